from __future__ import annotations

import csv
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leakwatch
from leakwatch.models import initialize
from leakwatch.quality import quality
from leakwatch.studies import InitializationComparison, compare_initializations
from leakwatch.studies.paper_attacks import engine
from studies.problems import network, samples

TINY: dict[str, Any] = {"seeds": 2, "steps": 4, "repeats": 2, "noise_std": 0.03}


def constant(module: nn.Module, generator: torch.Generator | None) -> None:
    """Every neuron alike: gradients then show few directions of the image."""
    for parameter in module.parameters():
        parameter.fill_(0.1)


@pytest.fixture(scope="module")
def compared() -> InitializationComparison:
    x, y = samples()
    return compare_initializations(
        network(), x, y, ["normal", "xavier", constant], index=range(10, 16), **TINY
    )


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def values(found: InitializationComparison, quantity: str, scheme: str) -> Tensor:
    points = [p for p in found.of(quantity) if p.scheme == scheme and p.seed == 1]
    return torch.tensor([p.value for p in points], dtype=torch.float64)


def test_scores_are_those_of_the_initialised_network(
    compared: InitializationComparison,
) -> None:
    x, y = samples()
    net = initialize(network(), "xavier", seed=1)
    expected = leakwatch.score(
        net, x, y, ["lavp", "i2f"], noise_std=0.03, dtype=torch.float64
    )
    for name in expected:
        torch.testing.assert_close(
            values(compared, name, "xavier"), expected[name], rtol=1e-9, atol=0.0
        )
    # Eq. 6: the two are one number.
    torch.testing.assert_close(
        values(compared, "i2f", "xavier").square(),
        0.03**2 * values(compared, "inverse_sum", "xavier"),
        rtol=1e-9,
        atol=0.0,
    )


def test_errors_are_those_of_the_attacks(compared: InitializationComparison) -> None:
    x, y = samples()
    net = initialize(network(), "normal", seed=1)
    expected = []
    for repeat in range(2):
        found = leakwatch.attack(
            net,
            x,
            y,
            engine("gs", 4),
            start="normal",
            noise_std=0.03,
            seed=repeat,
            data_range=1.0,
        )
        expected.append(quality(found.images, x, metrics=("mse",))["mse"])
    torch.testing.assert_close(
        values(compared, "gs_mse", "normal"), torch.cat(expected), rtol=1e-5, atol=0.0
    )
    assert not torch.equal(expected[0], expected[1])
    assert {p.repeat for p in compared.of("dgl_mse")} == {0, 1}


def test_every_sample_is_kept_with_its_name(compared: InitializationComparison) -> None:
    points = compared.of("i2f_bayes_psnr")
    assert len(points) == 3 * 2 * 6
    assert {p.sample for p in points} == set(range(10, 16))
    assert {p.label for p in points if p.sample == 14} == {1}
    assert compared.schemes == ("normal", "xavier", "constant")
    assert compared.moments == ("initial",)
    assert compared.attacks == ("dgl_mse", "gs_mse")
    assert all(p.matched is None for p in points)


def test_what_is_infinite_is_unknown_in_the_ranking(
    compared: InitializationComparison,
) -> None:
    verdict = compared.verdict("inverse_sum")
    assert [r.scheme for r in verdict.unknown] == ["constant"]
    assert {r.scheme for r in verdict.ranked} == {"normal", "xavier"}
    assert "constant" in compared.table()
    assert "not known" in compared.table()
    lead = compared.verdict()
    assert lead.quantity.name == "i2f_range_psnr"
    assert lead.ranked[-1].scheme == "constant"
    assert not lead.unknown


def matched_by(
    compared: InitializationComparison, *schemes: str
) -> InitializationComparison:
    """The same, had every attack on these and none on other networks matched."""
    points = [
        p if p.matched is None else replace(p, matched=p.scheme in schemes)
        for p in compared.points
    ]
    return replace(compared, points=tuple(points))


def test_failed_attacks_are_not_called_safe(compared: InitializationComparison) -> None:
    for found in (matched_by(compared), matched_by(compared, "normal")):
        notes = " ".join(found.verdict("dgl_mse").notes)
        assert "does not say that a sample is safe" in notes
        assert not any("matched" in n for n in found.verdict("i2f").notes)
    assert "normal 24 of 24, xavier 0 of 24" in notes
    everyone = matched_by(compared, "normal", "xavier", "constant")
    assert not any("matched" in n for n in everyone.verdict("dgl_mse").notes)


def test_an_order_of_failures_does_not_lead_the_report(
    compared: InitializationComparison, tmp_path: Path
) -> None:
    first = "i2f_range_psnr"
    for schemes in ((), ("normal",)):
        found = matched_by(compared, *schemes)
        page = found.save(tmp_path / "-".join(("out", *schemes))).read_text()
        ranking = page.split('<ul class="limits">', 1)[1]
        assert re.findall(r"<strong>([^<]*)</strong>", ranking)[0] == first
        assert re.findall(r"<option>([^<]*)</option>", page)[0] == first
        names = [n for n in found.attacks if not found.matched(n)]
        assert page.count("no attack matched") == len(names)
        assert bool(names) == (not schemes)
        said = "none of 72 attacks matched the gradient" in page
        assert said == (not schemes)


def test_files(compared: InitializationComparison, tmp_path: Path) -> None:
    report = compared.save(tmp_path / "out")
    assert report == tmp_path / "out" / "report.html"
    rows = table(tmp_path / "out" / "values.csv")
    assert len(rows) == len(compared.points) == len(compared.rows())
    mine = next(r for r in rows if r["quantity"] == "lavp_l2_max")
    assert float(mine["value"]) == compared.of("lavp_l2_max")[0].value
    stored = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert stored["settings"]["noise_std"] == 0.03
    unknown = [s for s in stored["summary"] if not s["known"]]
    assert {(s["scheme"], s["mean"]) for s in unknown} >= {("constant", None)}
    summary = table(tmp_path / "out" / "summary.csv")
    assert {s["quantity"] for s in summary} >= {"dgl_mse", "inverse_sum", "loss"}
    page = report.read_text()
    assert "Which initialisation leaks least" in page
    assert "not known" in page
    assert "http://" not in page.split("<script>")[0]


def test_figure_shows_every_value(compared: InitializationComparison) -> None:
    compared = matched_by(compared, "normal")
    figure = compared.figure()
    assert figure.data[0].visible
    menu = [button.label for button in figure.layout.updatemenus[0].buttons]
    drawn = [trace for trace in figure.data if list(trace.y) != [None]]
    first = drawn[2 * menu.index("dgl_mse")]
    points = compared.of("dgl_mse")
    assert sorted(first.y) == pytest.approx(sorted(p.value for p in points))
    hollow = sum(s == "circle-open" for s in first.marker.symbol)
    assert hollow == sum(p.matched is False for p in points)


def test_without_plotly_tables_are_written(
    compared: InitializationComparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("plotly", "plotly.offline", "plotly.graph_objects"):
        monkeypatch.setitem(sys.modules, name, None)
    assert compared.save(tmp_path) == tmp_path / "comparison.json"
    assert not (tmp_path / "report.html").exists()


def test_training_in_between() -> None:
    x, y = samples()
    net = network()
    before = [p.clone() for p in net.parameters()]
    drawn: list[float] = []

    def train(copy: nn.Module) -> None:
        drawn.append(torch.rand(()).item())
        with torch.no_grad():
            for parameter in copy.parameters():
                parameter.mul_(0.5)

    state = torch.get_rng_state()
    found = compare_initializations(
        net, x, y, ["kaiming"], seeds=[4, 9], attacks=(), train=train
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, before, net.parameters()))
    assert len(set(drawn)) == 2
    assert found.moments == ("initial", "trained")
    expected = initialize(network(), "kaiming", seed=9)
    train(expected)
    scores = leakwatch.score(expected, x, y, "grad_norm", dtype=torch.float64)
    trained = [p.value for p in found.of("grad_norm", "trained") if p.seed == 9]
    assert trained == pytest.approx(scores["grad_norm"].tolist(), rel=1e-9)


def test_mistakes() -> None:
    x, y = samples()
    net = network()
    for match, schemes, more in (
        ("Unknown initialization 'he'", ["he"], {}),
        ("use 'pytorch'", ["default"], {}),
        (r"list with at least one", [], {}),
        (r"list with at least one .*got 'uniform'", "uniform", {}),
        ("two schemes named 'xavier'", ["xavier", "xavier"], {}),
        ("seeds must be a positive number", ["xavier"], {"seeds": 0}),
        ("seeds must be .*different", ["xavier"], {"seeds": [1, 1]}),
        ("noise_std must be positive", ["xavier"], {"noise_std": 0.0}),
        ("repeats must be at least 1", ["xavier"], {"repeats": 0}),
        ("unknown attack 'dlgg'", ["xavier"], {"attacks": ["dlgg"]}),
        ("different names", ["xavier"], {"attacks": ["gs", "gs"]}),
        ("data-set index 1 occurs twice", ["xavier"], {"index": [1, 1, 2, 3, 4, 5]}),
    ):
        with pytest.raises(ValueError, match=match):
            compare_initializations(net, x, y, schemes, **more)
    with pytest.raises(TypeError, match="got 3"):
        compare_initializations(net, x, y, [3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="an attack is 'dgl'"):
        compare_initializations(net, x, y, ["xavier"], attacks=[3])  # type: ignore[list-item]


def test_quantities_and_moments_that_were_not_measured(
    compared: InitializationComparison,
) -> None:
    with pytest.raises(ValueError, match=r"'psnr' was not measured; .*choose from"):
        compared.of("psnr")
    with pytest.raises(ValueError, match="only at initial; give a function train"):
        compared.of("i2f", "trained")
    assert math.isfinite(compared.verdict("i2f").ranked[0].mean)
