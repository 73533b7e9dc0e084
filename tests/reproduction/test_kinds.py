"""Each kind of experiment makes of its cells what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import leakwatch
from leakwatch.reporting.statistics.correlation import spearman
from leakwatch.reproduction import read, reproduce
from leakwatch.reproduction.cells import Lab, Outcome
from leakwatch.reproduction.data import open_data
from leakwatch.reproduction.kinds.base import AttackSettings
from leakwatch.reproduction.kinds.correlation import Correlations, Row
from leakwatch.reproduction.kinds.final_losses import FinalLosses
from leakwatch.reproduction.networks import Network, train
from leakwatch.studies.cells import digest


def correlations(**changes: Any) -> Correlations:
    settings: dict[str, Any] = {
        "rows": (Row("mnist", "L2"),),
        "attacks": {"L2": AttackSettings("lavp-l2", noise_std=0.01)},
        "networks": {"a": Network("linear"), "b": Network("linear")},
        "scores": ("grad_norm", "i2f"),
        "columns": {"norm": "grad_norm", "i2f": "i2f"},
        "metrics": ("mse",),
        "seeds": 1,
    }
    return Correlations(**{**settings, **changes})


def outcomes(values: dict[str, dict[str, list[float]]]) -> list[Outcome]:
    """Of network → column → values, in two cells each."""
    found = []
    for network, columns in values.items():
        n = len(columns["mse"])
        for what, names in (
            ("scores for noise 0.01", ["grad_norm", "i2f"]),
            ("L2", ["mse"]),
        ):
            for part in (slice(0, n // 2), slice(n // 2, n)):
                place = {"data": "MNIST", "network": f"{network} 0", "what": what}
                cut = {name: columns[name][part] for name in names}
                words = {"attack": ["ok"] * len(cut[names[0]])} if what == "L2" else {}
                found.append(Outcome(place, cut, words, 1.0))
    return found


def test_correlations_are_averaged_over_networks_and_compared() -> None:
    generator = np.random.default_rng(0)
    values = {}
    for network in ("a", "b"):
        mse = generator.random(60)
        values[network] = {
            "mse": mse.tolist(),
            "grad_norm": (-mse + 0.6 * generator.random(60)).tolist(),
            "i2f": (mse**2).tolist(),
        }
    summary = correlations(against="norm").summarise(outcomes(values))
    entries = {(e.row, e.column): e for e in summary.entries}
    assert entries["MNIST+L2", "i2f"].value == 1
    rhos = [
        spearman(v["grad_norm"], v["mse"], bootstrap=0).rho for v in values.values()
    ]
    norm = entries["MNIST+L2", "norm"]
    assert norm.value == pytest.approx(np.mean(rhos), abs=1e-4)
    assert norm.n == 120
    gap = entries["MNIST+L2: |ρ| − |ρ of norm|", "i2f"]
    assert gap.value == pytest.approx(1 - abs(np.mean(rhos)), abs=1e-4)
    assert gap.low is not None
    assert gap.low > 0
    assert summary.notes == ("MNIST+L2: 120 of 120 attacks matched their gradient.",)


def test_scores_that_are_no_number_leave_the_correlation_undefined() -> None:
    nothing = [float("nan")] * 8
    rising = [float(i) for i in range(8)]
    columns = {"mse": rising, "grad_norm": rising, "i2f": nothing}
    kind = correlations(networks={"a": Network("linear")})
    summary = kind.summarise(outcomes({"a": columns}))
    entries = {e.column: e for e in summary.entries}
    assert entries["norm"].value == 1
    assert entries["i2f"].value is None
    assert entries["i2f"].status.startswith("undefined")


def test_a_figure_has_the_panels_that_were_asked_for() -> None:
    rising = [float(i) for i in range(8)]
    columns = {"mse": rising, "grad_norm": rising, "i2f": rising[::-1]}
    kind = correlations(
        networks={"a": Network("linear")}, panels=(("MNIST+L2", "i2f"),)
    )
    summary = kind.summarise(outcomes({"a": columns}))
    (panel,) = summary.panels
    assert panel.series["a 0"] == (rising[::-1], rising)
    assert [(e.row, e.column, e.value) for e in summary.entries] == [
        ("MNIST+L2", "i2f", -1)
    ]


def test_another_data_set_keeps_each_attack_once() -> None:
    kind = correlations(
        rows=(Row("cifar10", "L2"), Row("cifar100", "L2")),
        panels=(("C-10+L2", "i2f"), ("C-100+L2", "i2f")),
    ).on("mnist_sample")
    assert kind.rows == (Row("mnist_sample", "L2", "C-10+L2"),)
    assert kind.panels == (("digits+L2", "i2f"),)


def test_final_losses_are_those_of_the_tries(tmp_path: Path) -> None:
    attack = {"preset": "lavp-l2", "steps": 4, "restarts": 2, "start": "near"}
    small = {
        "data": "mnist_sample",
        "network": {"model": "linear", "epochs": 1, "images": 64},
        "attacks": {"L2": attack},
        "scores": {"norm": "grad_norm"},
        "pairs": [["L2", "norm"]],
        "shown": 2,
        "images": 6,
        "seeds": 1,
    }
    content = {
        "paper": "lavp",
        "item": "Table 4",
        "title": "t",
        "claim": "c",
        "kind": "final_losses",
        "scales": {"small": small},
    }
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    result, _ = reproduce(
        read(path), scale="small", output=tmp_path / "out", say=lambda line: None
    )
    entries = {(e.row, e.column, e.part): e.value for e in result.entries}

    data = open_data("mnist_sample", "nowhere")
    samples = data.samples(6)
    network = Network("linear", epochs=1, images=64)
    net = network.build(data.module, train(network, data.module, 0).states[1])
    found = AttackSettings("lavp-l2", steps=4, restarts=2, start="near").run(
        net, samples
    )
    mean = found.restart_loss.mean(0)
    for i in range(2):
        value = entries["final loss (L2)", f"Image {i + 1}", "mean"]
        torch.testing.assert_close(value, float(mean[i]), rtol=1e-4, atol=0)
    assert "ρ of final loss (L2) with norm" in {e.row for e in result.entries}


def test_a_pair_of_nothing_is_named() -> None:
    with pytest.raises(ValueError, match="unknown row of a pair 'grad'"):
        FinalLosses(
            data="mnist",
            network=Network("linear"),
            attacks={"L2": AttackSettings("lavp-l2")},
            scores={"norm": "grad_norm"},
            pairs=(("L2", "grad"),),
        )


def test_bounds_count_only_where_asked_and_are_counted() -> None:
    rising = [float(i) for i in range(8)]
    columns = {"mse": rising, "grad_norm": rising, "i2f": rising}
    cells = outcomes({"a": columns})
    cells = [
        replace(o, status={"i2f": ["ok"] + ["not converged"] * 3})
        if o.place["what"] != "L2"
        else o
        for o in cells
    ]
    one = {"a": Network("linear")}
    without = correlations(networks=one).summarise(cells)
    assert {e.column: e.value for e in without.entries} == {"norm": 1, "i2f": None}
    assert without.notes[1] == "i2f: 6 of 8 values are not converged, left out."
    withal = correlations(networks=one, bounds=True).summarise(cells)
    assert {e.column: e.value for e in withal.entries} == {"norm": 1, "i2f": 1}
    assert withal.notes[1] == "i2f: 6 of 8 values are not converged, used as they are."


def test_exposure_is_the_median_after_each_epoch(tmp_path: Path) -> None:
    small = {
        "data": "mnist_sample",
        "networks": {
            "linear": {"model": "linear", "epochs": 2, "keep": [0], "images": 64}
        },
        "scores": ["grad_norm"],
        "noise_std": 0.01,
        "attacks": {"L2": {"preset": "lavp-l2", "steps": 2, "restarts": 1}},
        "images": 5,
        "seeds": 2,
    }
    content = {
        "paper": "leakwatch",
        "item": "Question 3",
        "title": "t",
        "claim": "c",
        "kind": "exposure",
        "scales": {"small": small},
    }
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    result, where = reproduce(
        read(path), scale="small", output=tmp_path / "out", say=lambda line: None
    )
    assert (where / "figure.png").is_file()
    entries = {(e.row, e.column): e for e in result.entries}
    assert entries.keys() == {
        (f"linear, epoch {epoch}", column)
        for epoch in (0, 2)
        for column in ("grad_norm", "L2: psnr")
    }
    data = open_data("mnist_sample", "nowhere")
    samples = data.samples(5)
    network = Network("linear", epochs=2, keep=(0,), images=64)
    norms = []
    for seed in range(2):
        net = network.build(data.module, train(network, data.module, seed).states[2])
        found = leakwatch.score(net, samples.x, samples.y, "grad_norm")
        norms += found["grad_norm"].tolist()
    entry = entries["linear, epoch 2", "grad_norm"]
    assert entry.value == pytest.approx(np.median(norms), rel=1e-4)
    assert entry.n == 10


#: The others differ from these in data and columns only.
# Over ten seconds each.
SLOW = ("leakwatch-question-1", "lavp-table-2")
RUN = [
    "lavp-table-1",
    "lavp-table-2",
    "lavp-table-4",
    "lavp-figure-2",
    "leakwatch-question-1",
    "leakwatch-question-2",
    "leakwatch-question-3",
]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name in SLOW else name
        for name in RUN
    ],
)
def test_an_experiment_of_the_package_gets_from_cells_to_its_table(name: str) -> None:
    settings: Any = read(name).settings("small").on("mnist_sample")
    attacks = {
        key: replace(attack, steps=2, restarts=min(2, attack.tries))
        for key, attack in settings.attacks.items()
    }
    changes: dict[str, Any] = {
        "attacks": attacks,
        "seeds": 1,
        "images": 3,
        "per_cell": 3,
    }
    if hasattr(settings, "networks"):
        key, network = next(iter(settings.networks.items()))
        changes["networks"] = {key: replace(network, epochs=0, keep=())}
    else:
        changes["network"] = replace(settings.network, epochs=0)
    settings = replace(settings, **changes)
    pictures = open_data("mnist_sample", "nowhere")
    trained = {
        need.place: train(need.network, pictures.module, 0)
        for need in settings.needed()
    }
    found = []
    for cell in settings.cells(Lab({"mnist_sample": pictures}, trained)):
        work = cell.work()
        found.append(work.call(*work.arguments))
    summary = settings.summarise(found)
    assert summary.entries
    assert any(entry.value is not None for entry in summary.entries)
    assert summary.notes
    assert all(panel.series for panel in summary.panels)
    assert bool(summary.panels) == ("figure" in name or name.endswith("question-3"))


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("lavp-table-3", "lavp-table-1"),
        ("lavp-figure-2", "lavp-table-1"),
        ("lavp-figure-3", "lavp-table-2"),
    ],
)
def test_the_same_measurement_is_computed_once(name: str, of: str) -> None:
    pictures = open_data("mnist_sample", "nowhere")
    networks = {"linear": Network("linear")}
    trained = {
        f"linear on mnist_sample, seed {seed}": train(
            networks["linear"], pictures.module, seed
        )
        for seed in range(3)
    }
    keys = []
    for one in (name, of):
        settings: Any = read(one).settings("small").on("mnist_sample")
        assert settings.networks == read(of).settings("small").networks  # type: ignore[attr-defined]
        small = replace(settings, networks=networks, images=3)
        cells = small.cells(Lab({"mnist_sample": pictures}, trained))
        keys.append({digest(cell.work().key) for cell in cells})
    assert keys[0] == keys[1]
