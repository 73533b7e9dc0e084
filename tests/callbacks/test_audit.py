"""InversionAudit with attacks whose results are known beforehand."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from monitor_cases import CLASSES, Tiny, Watcher, dataset, fit, rows_of, streams
from torch import Tensor

from leakwatch import Status
from leakwatch.attacks import PixelScale, Reconstruction, SharedGradient, Start
from leakwatch.callbacks import InversionAudit, LeakageMonitor
from leakwatch.callbacks._audit.plan import chosen
from leakwatch.callbacks._probing.run import ProbeRun
from leakwatch.derivatives import GradientMap
from leakwatch.probes import ProbeSet
from leakwatch.reporting import RiskLedger, Row
from leakwatch.reporting.statistics.correlation import spearman
from leakwatch.status import OK


@dataclass
class Known:
    """Returns the truth, which it looks up by index, plus a known error.

    Attributes:
        error: sample → what is added to every pixel.
        status: of every result.
        other: error of a second try, which matched less.
    """

    error: Callable[[int], float]
    status: Status = OK
    other: float | None = None
    name: str = "known"
    seen: list[dict[str, Any]] = field(default_factory=list)

    def run(
        self,
        gradients: GradientMap,
        shared: SharedGradient,
        *,
        pixels: PixelScale,
        start: Start,
        seed: int,
        restarts: int,
        time_limit: float | None = None,
        progress: Any = None,
        initial: Tensor | None = None,
    ) -> Reconstruction:
        index = shared.index
        assert index is not None
        self.seen.append(
            {
                "shared": shared,
                "start": start,
                "restarts": restarts,
                "pixels": pixels,
                "time_limit": time_limit,
            }
        )
        x = torch.stack([dataset()[i][0] for i in index])
        images = x + torch.tensor([self.error(i) for i in index]).view(-1, 1, 1, 1)
        n = len(index)
        labels = shared.labels
        assert labels is not None
        tries = [images] if self.other is None else [images, x + self.other]
        return Reconstruction(
            images=images,
            labels=labels[:, 0],
            loss=torch.zeros(n, dtype=torch.float64),
            relative=torch.full((n,), 0.25, dtype=torch.float64),
            status=(self.status,) * n,
            iterations=torch.ones(n, dtype=torch.int64),
            restart_images=torch.stack(tries)[:, :, None],
            restart_loss=torch.arange(len(tries)).double()[:, None].expand(-1, n),
            seconds=0.0,
            attack=self.name,
            start=start.name,
            practical=start.practical,
        )


def audit(**changes: Any) -> InversionAudit:
    arguments: dict[str, Any] = {
        "probes": probes(),
        "attack": Known(lambda i: 0.3),
        "worst_case": Known(lambda i: 1e-3 * (1 + i)),
        "report": False,
        "verbose": False,
    }
    return InversionAudit(**(arguments | changes))


def probes(n: int = 6) -> ProbeSet:
    data = dataset()
    x = torch.stack([data[i][0] for i in range(n)])
    # Away from 0 and 1, where a reconstruction would be clipped.
    return ProbeSet.from_tensors(x, [int(data[i][1]) for i in range(n)])


def find(rows: list[Row], quantity: str) -> dict[int | None, Row]:
    return {r.sample: r for r in rows if r.quantity == quantity}


def test_quality_verdicts_and_correlations_are_recorded(tmp_path: Path) -> None:
    watched = audit(attack=Known(lambda i: 0.5), log="all")
    run = fit(tmp_path, watched, max_epochs=1)
    rows = rows_of(watched)
    assert {r.epoch for r in rows} == {1}
    x = probes().x
    near = find(rows, "audit/near/psnr")
    assert list(near) == [0, 1, 2, 3, 4, 5]
    for i, row in near.items():
        assert i is not None
        found = (x[i] + 1e-3 * (1 + i)).clamp(0, 1)
        expected = -10 * math.log10(float((found - x[i]).double().square().mean()))
        assert row.value == pytest.approx(expected, rel=1e-5)
        assert row.status == "ok"
    assert {r.value for r in find(rows, "audit/near/verdict").values()} == {1.0}
    assert {r.value for r in find(rows, "audit/random/verdict").values()} == {0.0}
    assert {r.value for r in find(rows, "audit/random/match").values()} == {0.25}
    assert find(rows, "audit/near/recovered")[None].value == 1.0
    assert find(rows, "audit/random/recovered")[None].value == 0.0
    assert find(rows, "audit/near/conclusive")[None].value == 1.0
    score = find(rows, "lavp_l2_max")
    rho = spearman(
        [score[i].value for i in range(6)], [near[i].value for i in range(6)]
    ).rho
    told = find(rows, "audit/spearman/lavp_l2_max/near/psnr")[None]
    assert told.value == pytest.approx(rho, abs=1e-12)
    assert "n = 6" in told.status
    metrics = {k: float(v) for k, v in run.callback_metrics.items()}
    assert metrics["leakwatch-audit/audit/near/psnr/worst"] == pytest.approx(
        max(r.value for r in near.values()), rel=1e-6
    )
    key = "leakwatch-audit-detail/audit/spearman/lavp_l2_max/near/psnr"
    assert metrics[key] == pytest.approx(rho, abs=1e-6)


def test_the_time_limit_is_that_of_all_attacks_of_an_audit(tmp_path: Path) -> None:
    near, random = Known(lambda i: 0.1), Known(lambda i: 0.5)
    watched = audit(attack=random, worst_case=near, time_limit=60.0)
    fit(tmp_path, watched, max_epochs=1)
    (first,), (second,) = ([s["time_limit"] for s in a.seen] for a in (near, random))
    assert first == 30.0
    # The first took next to nothing, and leaves it to the second.
    assert 50.0 < second < 60.0


def test_the_nearest_try_is_told_apart_from_the_one_that_matches_best(
    tmp_path: Path,
) -> None:
    watched = audit(attack=Known(lambda i: 0.03, other=0.01), worst_case=None)
    fit(tmp_path, watched)
    rows = rows_of(watched)
    for name, error in (("psnr", 0.03), ("best_psnr", 0.01)):
        for i, row in find(rows, f"audit/random/{name}").items():
            x = probes().x[i]
            apart = ((x + error).clamp(0, 1) - x).double()
            expected = -10 * math.log10(float(apart.square().mean()))
            assert row.value == pytest.approx(expected, rel=1e-5)
            assert row.status == "ok"
    line = watched.sentence(rows)
    assert line is not None
    assert "40.0 dB for the nearest of all tries" in line


def test_one_try_has_no_nearest(tmp_path: Path) -> None:
    watched = audit()
    fit(tmp_path, watched)
    assert not find(rows_of(watched), "audit/near/best_psnr")


def test_a_failed_try_takes_no_number_from_the_nearest(tmp_path: Path) -> None:
    lost = Status("not converged", "the gradient was not matched")
    watched = audit(attack=Known(lambda i: 0.4, lost, other=math.nan), worst_case=None)
    fit(tmp_path, watched)
    for row in find(rows_of(watched), "audit/random/best_psnr").values():
        assert row.status == str(lost)


def test_baselines_are_closed_forms(tmp_path: Path) -> None:
    watched = audit()
    fit(tmp_path, watched)
    rows = rows_of(watched)
    x = probes().x.double()
    for i in range(6):
        constant = find(rows, "audit/baseline/constant_psnr")[i].value
        variance = float(x[i].var(correction=0))
        assert constant == pytest.approx(-10 * math.log10(variance), rel=1e-5)
        assert find(rows, "image_std")[i].value == pytest.approx(variance**0.5)
        across = float((x[i, 0, :, 1:] - x[i, 0, :, :-1]).abs().mean())
        down = float((x[i, 0, 1:] - x[i, 0, :-1]).abs().mean())
        assert find(rows, "image_tv")[i].value == pytest.approx(across + down)


def test_an_attack_that_matched_nothing_is_inconclusive(tmp_path: Path) -> None:
    lost = Status("not converged", "the gradient was not matched")
    watched = audit(attack=Known(lambda i: 0.4, lost), worst_case=None)
    run = fit(tmp_path, watched)
    rows = rows_of(watched)
    for name in ("psnr", "verdict"):
        for row in find(rows, f"audit/random/{name}").values():
            assert row.status == str(lost)
    assert all(math.isnan(r.value) for r in find(rows, "audit/random/verdict").values())
    assert find(rows, "audit/random/conclusive")[None].value == 0.0
    recovered = find(rows, "audit/random/recovered")[None]
    assert math.isnan(recovered.value)
    assert recovered.status.startswith("undefined")
    # What nobody may read as safety is not a number on any dashboard.
    assert math.isnan(
        float(run.callback_metrics["leakwatch-audit/audit/random/psnr/worst"])
    )


def test_a_picture_that_shows_the_sample_counts_whatever_the_attack_says(
    tmp_path: Path,
) -> None:
    lost = Status("not converged", "the gradient was not matched")
    watched = audit(attack=Known(lambda i: 0.01, lost), worst_case=None)
    fit(tmp_path, watched)
    verdicts = find(rows_of(watched), "audit/random/verdict")
    assert {(r.value, r.status) for r in verdicts.values()} == {(1.0, "ok")}


class Broken(Known):
    def run(self, *args: Any, **keywords: Any) -> Reconstruction:
        raise ArithmeticError("no luck")


def test_an_attack_that_fails_stops_nothing(tmp_path: Path) -> None:
    watched = audit(attack=Broken(lambda i: 0.0))
    with pytest.warns(UserWarning, match="no luck"):
        run = fit(tmp_path, watched, max_epochs=2)
    assert run.current_epoch == 2
    rows = rows_of(watched)
    for row in find(rows, "audit/random/psnr").values():
        assert row.status.startswith("failed: ArithmeticError: no luck")
        assert math.isnan(row.value)
    assert {r.status for r in find(rows, "audit/near/psnr").values()} == {"ok"}
    assert {r.status for r in find(rows, "lavp_l2_max").values()} == {"ok"}


def test_training_is_bit_identical(tmp_path: Path) -> None:
    def weights(*callbacks: Any) -> tuple[list[Tensor], Any]:
        module = None

        def look(_: Any, m: Any) -> None:
            nonlocal module
            module = m

        fit(tmp_path, *callbacks, Watcher(look), max_epochs=2)
        assert module is not None
        return [p.detach().clone() for p in module.parameters()], streams()

    plain, after_plain = weights()
    watched, after_watched = weights(audit(at_start=True))
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert after_plain == after_watched


def test_what_the_attacker_is_given(tmp_path: Path) -> None:
    near, far = Known(lambda i: 0.0), Known(lambda i: 0.0)

    def halve(g: Tensor) -> Tensor:
        return g / 2

    seen: list[Tensor] = []

    def look(_: Any, module: Any) -> None:
        gradients = GradientMap(module)
        p = probes()
        seen.append(gradients(p.x, p.y))

    watched = audit(
        attack=far, worst_case=near, restarts=3, perturb=halve, noise_std=1e-3
    )
    fit(tmp_path, Watcher(look), watched)
    for attack, restarts, name in ((near, 1, "near"), (far, 3, "normal")):
        (call,) = attack.seen
        assert call["restarts"] == restarts
        assert call["start"].name == name
        assert call["shared"].noise_std == 1e-3
        left = call["shared"].gradient - seen[0] / 2
        # 6 × 123 draws of N(0, 1e-3): within five standard errors.
        error = 5e-3 / math.sqrt(2 * left.numel())
        assert float(left.std()) == pytest.approx(1e-3, abs=error)
    assert torch.equal(near.seen[0]["shared"].gradient, far.seen[0]["shared"].gradient)
    assert near.seen[0]["pixels"].boxed


def test_only_chosen_samples_are_scored_evenly_by_class(tmp_path: Path) -> None:
    p = probes(6)
    assert chosen(p, None) == [0, 1, 2, 3, 4, 5]
    picked = chosen(p, CLASSES)
    assert sorted(p.y[picked].tolist()) == list(range(CLASSES))
    watched = audit(samples=CLASSES)
    fit(tmp_path, watched)
    rows = rows_of(watched)
    assert list(find(rows, "audit/near/psnr")) == picked
    assert list(find(rows, "lavp_l2_max")) == picked


def test_two_processes_find_what_one_does(tmp_path: Path) -> None:
    def share(rank: int, world_size: int) -> list[Row]:
        torch.manual_seed(0)
        module = Tiny()
        watched = audit(attack=Known(lambda i: 0.1 * i))
        run = ProbeRun(watched, module, probes(), warn=pytest.fail)
        return run.measure(1, 1, rank=rank, world_size=world_size).rows

    whole = {(r.sample, r.quantity): r.value for r in share(0, 1)}
    parts = {(r.sample, r.quantity): r.value for rank in (0, 1) for r in share(rank, 2)}
    assert parts.keys() == whole.keys()
    for key, value in whole.items():
        # Noise arrives through float32 products of a whole batch: its last digit moves.
        rel = 1e-7 if key[1] == "i2f_range_psnr" else 1e-9
        assert parts[key] == pytest.approx(value, rel=rel, abs=1e-12), key


def test_pictures_stay_in_the_ledger_and_reach_the_report(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    watched = audit(report=True)
    fit(tmp_path, watched, max_epochs=2)
    assert watched.run_directory is not None
    ledger = RiskLedger.open(watched.run_directory)
    _, last = ledger.attacks()
    assert last["original"].shape == (6, 4, 4, 1)
    assert last["original"].dtype.name == "uint8"
    assert last["sample"].tolist() == [0, 1, 2, 3, 4, 5]
    assert int(last["epoch"]) == 2
    original = (probes().x[:, 0] * 255).round()
    assert torch.equal(torch.tensor(last["original"][..., 0]).float(), original)
    page = (Path(watched.run_directory) / "report.html").read_text()
    assert "What attacks achieved" in page
    # Of both attacks, after each epoch.
    for epoch in (1, 2):
        label = f'aria-label="reconstruction of sample 3, after epoch {epoch}"'
        assert page.count(label) == 2
    assert "worst case (starts beside the sample)" in page
    assert 'id="fig-achieved"' in page
    assert 'id="fig-predicted"' in page


def test_the_report_never_calls_an_inconclusive_attack_safe(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    lost = Status("not converged", "the gradient was matched to 80 % only")
    watched = audit(attack=Known(lambda i: 0.4, lost), report=True)
    fit(tmp_path, watched)
    page = (Path(str(watched.run_directory)) / "report.html").read_text()
    assert "Inconclusive attacks." in page
    assert "the gradient was matched to 80 % only" in page
    assert page.count(">inconclusive</span>") == 6


def test_both_callbacks_in_one_trainer(tmp_path: Path) -> None:
    watched = audit()
    monitor = LeakageMonitor(probes(), report=False, verbose=False)
    fit(tmp_path, monitor, watched)
    assert monitor.run_directory != watched.run_directory
    scores = {
        r.quantity: r.value for r in rows_of(monitor) if r.sample == 2 and r.epoch == 1
    }
    again = {r.quantity: r.value for r in rows_of(watched) if r.sample == 2}
    for name, value in scores.items():
        assert again[name] == value


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"attack": None, "worst_case": None}, "nothing to audit"),
        ({"worst_case": "ci-net"}, "ci-net only at random latents"),
        ({"attack": "inverting"}, "inverting-gradients"),
        ({"steps": 0}, "steps"),
        ({"restarts": 0}, "restarts"),
        ({"samples": 0}, "samples"),
        ({"radius": 0.0}, "radius"),
        ({"metrics": ["pnsr"]}, "pnsr"),
        ({"time_limit": -1.0}, "time_limit"),
    ],
)
def test_arguments(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        audit(**arguments)


def test_a_perturbation_is_a_function() -> None:
    with pytest.raises(TypeError, match="perturb"):
        audit(perturb=0.1)


def test_no_warning_of_an_audit_without_trouble(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path, audit())
    assert [w for w in caught if "leakwatch" in str(w.message)] == []


def test_a_near_attack_that_did_nothing_recovers_nothing(tmp_path: Path) -> None:
    class Still(Known):
        def run(
            self, gradients: Any, shared: Any, *, start: Start, **more: Any
        ) -> Reconstruction:
            found = super().run(gradients, shared, start=start, **more)
            drawn = start.draw(targets=6, images=1, shape=(1, 4, 4), index=shared.index)
            return replace(found, images=drawn[0, :, 0])

    watched = audit(attack=None, worst_case=Still(lambda i: 0.0), radius=0.01)
    fit(tmp_path, watched)
    for row in find(rows_of(watched), "audit/near/verdict").values():
        assert math.isnan(row.value)
        assert "did not move from its start" in row.status


def test_an_exact_picture_of_one_colour_is_recovered(tmp_path: Path) -> None:
    """The best constant image is as good; the attack found it all the same."""
    x = torch.linspace(0.2, 0.8, 3).view(3, 1, 1, 1).expand(3, 1, 4, 4).clone()

    @dataclass
    class Exact(Known):
        def run(self, *args: Any, **keywords: Any) -> Reconstruction:
            found = super().run(*args, **keywords)
            return replace(found, images=x + 1e-3)

    watched = audit(
        probes=ProbeSet.from_tensors(x, [0, 1, 2]),
        attack=Exact(lambda i: 0.0),
        worst_case=None,
    )
    fit(tmp_path, watched)
    verdicts = find(rows_of(watched), "audit/random/verdict")
    assert {r.value for r in verdicts.values()} == {1.0}


def test_one_gradient_without_a_number_leaves_the_others_alone(tmp_path: Path) -> None:
    def breaks(g: Tensor) -> Tensor:
        calls.append(1)
        return g / 0 if len(calls) % 6 == 3 else g

    calls: list[int] = []
    watched = audit(perturb=breaks)
    watched.examine = lambda *_: None  # type: ignore[method-assign]
    fit(tmp_path, watched)
    for kind in ("near", "random"):
        rows = find(rows_of(watched), f"audit/{kind}/psnr")
        assert len(rows) == 6
        for sample, row in rows.items():
            word = "failed" if sample == 2 else "ok"
            assert row.status.startswith(word), (sample, row)
            assert math.isnan(row.value) == (sample == 2)


def test_a_random_defense_depends_on_the_sample_only(tmp_path: Path) -> None:
    def noisy(g: Tensor) -> Tensor:
        return g + 1e-2 * torch.randn_like(g)

    given = []
    for chosen_probes in (probes(6), probes(2)):
        attack = Known(lambda i: 0.1)
        fit(tmp_path, audit(probes=chosen_probes, attack=attack, perturb=noisy))
        given.append(attack.seen[0]["shared"].gradient[:2])
    torch.testing.assert_close(given[0], given[1], rtol=1e-5, atol=1e-6)


def test_what_can_never_work_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no BatchNorm"):
        fit(tmp_path, audit(attack="gradinversion-bn"))
    with pytest.raises(TypeError, match="perturb must return"):
        fit(tmp_path, audit(perturb=lambda g: None))
    with pytest.raises(ValueError, match="perturb must keep the shape"):
        fit(tmp_path, audit(perturb=lambda g: g[:, 1:]))
    with pytest.raises(TypeError, match="an attack object"):
        audit(attack=Known)


@pytest.mark.parametrize("attack", ["inverting-gradients", "combined"])
def test_features_are_attacked_without_total_variation(
    tmp_path: Path, attack: str
) -> None:
    x = torch.rand(6, 16)
    watched = audit(
        probes=ProbeSet.from_tensors(x, [0, 1, 2, 0, 1, 2]),
        attack=attack,
        worst_case=None,
        steps=3,
        metrics="psnr",
    )
    fit(tmp_path, watched)
    rows = find(rows_of(watched), "audit/random/match")
    assert {r.status for r in rows.values()} == {"ok"}


def test_training_survives_where_warnings_are_errors(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run = fit(tmp_path, audit(attack=Broken(lambda i: 0.0)), max_epochs=2)
    assert run.current_epoch == 2
