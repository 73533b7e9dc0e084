"""What each kind of experiment measures, against closed forms and public functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import leakwatch
from leakwatch.attacks import attack_update
from leakwatch.defenses import GradientPruning
from leakwatch.derivatives import GradientMap
from leakwatch.federated import (
    LocalTraining,
    client_updates,
    principal_subspace,
    segment_similarity,
    train_client,
)
from leakwatch.quality import align, quality
from leakwatch.reproduction import names, read
from leakwatch.reproduction.cells import Lab, Outcome
from leakwatch.reproduction.data import Samples, open_data
from leakwatch.reproduction.federation import trainer
from leakwatch.reproduction.kinds.base import AttackSettings
from leakwatch.reproduction.kinds.batches import Batches
from leakwatch.reproduction.kinds.eigenvalues import (
    Effort,
    EigenRow,
    Eigenvalues,
    Eigenvectors,
)
from leakwatch.reproduction.kinds.perturbed import (
    Fairness,
    Influence,
    Levels,
    PerturbedRow,
    Prediction,
    influences,
    perturbation,
)
from leakwatch.reproduction.kinds.updates import (
    UpdateAttacks,
    UpdateAttackSettings,
    UpdateCosts,
    UpdatePaths,
    UpdateRow,
)
from leakwatch.reproduction.networks import Network, Trained
from leakwatch.reproduction.result import Summary

DIGITS = "mnist_sample"
# Over ten seconds each.
SLOW = ("i2f-figure-10",)
MINE = [name for name in names() if name.split("-")[0] in ("i2f", "sme", "ci")]


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(16, 12), nn.Sigmoid(), nn.Linear(12, 3)
    ).eval()


def small_samples() -> Samples:
    torch.manual_seed(1)
    pixels = torch.rand(4, 1, 4, 4)
    y = torch.tensor([0, 1, 2, 1])
    return Samples((pixels - 0.4) / 0.3, y, (0.4,), (0.3,), 0.3, 3)


@pytest.fixture(scope="module")
def lab_of() -> Any:
    """Networks of an experiment on digits, trained for an epoch at most."""
    pictures = open_data(DIGITS, "nowhere")

    def made(settings: Any) -> Lab:
        trained = {}
        for need in settings.needed():
            net = need.network
            short = replace(net, epochs=min(1, net.epochs), keep=(), images=100)
            found = trainer(short)(short, pictures.module, need.seed, "cpu")
            state = found.states[found.last]
            kept = {*net.keep, net.epochs}
            trained[need.place] = Trained(
                dict.fromkeys(kept, state), dict.fromkeys(kept, 0.0), 0.0
            )
        return Lab({DIGITS: pictures}, trained)

    return made


def entries(summary: Summary) -> dict[tuple[str, str, str], float | None]:
    return {(e.row, e.column, e.part): e.value for e in summary.entries}


def outcome(
    place: Mapping[str, str],
    columns: Mapping[str, Sequence[float]],
    words: Sequence[str] = (),
) -> Outcome:
    status = {"attack": words} if words else {}
    return Outcome(place, columns, status, 0.0)


# -- every experiment --------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name in SLOW else name
        for name in MINE
    ],
)
def test_a_cell_of_each_part_runs(name: str, lab_of: Any) -> None:
    settings = read(name).settings("small").on(DIGITS)
    small: Any = replace(settings.piece()[0], seeds=1)  # type: ignore[type-var]
    if hasattr(small, "batch"):
        small = replace(small, batch=2)
    shorter = {
        key: replace(row, epochs=1, samples=4, batch=2)
        for key, row in getattr(small, "rows", {}).items()
        if isinstance(row, UpdateRow)
    }
    if shorter:
        small = replace(small, rows=shorter)
    cells = small.cells(lab_of(small))
    for part in {cell.part for cell in cells}:
        work = next(cell for cell in cells if cell.part == part).work()
        found = work.call(*work.arguments)
        assert found.columns
        assert all(len(v) > 0 for v in found.columns.values())


# -- perturbed gradients -----------------------------------------------------------


def test_influences_are_those_of_score() -> None:
    net, samples = small_net(), small_samples()
    gradients = GradientMap(net, dtype=torch.float64)
    clean = gradients(samples.x.double(), samples.y)
    delta = perturbation(clean, 0, 0, variance=1e-4)
    predictions = {
        "I": Influence("i2f"),
        "I, ε": Influence("i2f", 0.01),
        "lb": Influence("i2f_lb"),
        "nom": Influence("i2f_nom"),
        "g": Influence("grad_norm"),
    }
    found = influences(net, samples, {"here": delta}, predictions)
    for name, one in predictions.items():
        expected = leakwatch.score(
            net,
            samples.x.double(),
            samples.y,
            one.score,
            delta=delta,
            noise_std=0.01,
            epsilon=one.epsilon,
            mean=samples.mean,
            std=samples.std,
            dtype=torch.float64,
        )[one.score]
        root = 1 if one.score == "grad_norm" else math.sqrt(16)
        torch.testing.assert_close(
            torch.tensor(found[f"{name} at here"]).double(),
            expected.double() / root,
            rtol=1e-5,
            atol=0,
        )
    fewer = {"lb": Influence("i2f_lb")}
    alone = influences(net, samples, {"here": delta}, fewer, solver="lanczos")
    assert alone["lb at here"] == pytest.approx(found["lb at here"], rel=1e-4)


def test_influence_is_unknown_where_eigenvalues_are() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 2), nn.Linear(2, 3)).eval()
    samples = small_samples()
    # Only what two units see can be in the gradient of the later layer, but the first
    # layer's gradient holds the input itself; without it directions are hidden.
    net[1].weight.requires_grad_(False)
    gradients = GradientMap(net, dtype=torch.float64)
    delta = perturbation(gradients(samples.x.double(), samples.y), 0, 0, variance=1e-4)
    predictions = {"I": Influence("i2f"), "I, ε": Influence("i2f", 0.1)}
    found = influences(net, samples, {"here": delta}, predictions)
    assert all(math.isnan(v) for v in found["I at here"])
    assert all(math.isfinite(v) for v in found["I, ε at here"])


def test_perturbations_do_not_depend_on_pieces() -> None:
    g = torch.randn(4, 5000, dtype=torch.float64)
    whole = perturbation(g, 0, 3, variance=1e-2)
    rest = perturbation(g[2:], 2, 3, variance=1e-2)
    assert torch.equal(whole[2:], rest)
    assert not torch.equal(whole, perturbation(g, 0, 4, variance=1e-2))
    assert float(whole.var()) == pytest.approx(1e-2, rel=0.05)
    pruned = perturbation(g, 0, 3, pruned=0.4)
    expected = GradientPruning(0.4).protect(g, generator=torch.Generator()).gradient
    torch.testing.assert_close(g + pruned, expected)


def perturbed(kind: Any, **more: Any) -> Any:
    common = {
        "rows": {"row": PerturbedRow(DIGITS, "net")},
        "attacks": {"A": AttackSettings("lavp-l2", steps=2)},
        "networks": {"net": Network("linear")},
        "variances": (1e-4, 1e-2),
        "images": 20,
        "seeds": 2,
    }
    return kind(**(common | more))


def made_up(settings: Any, ratio: float, errors: Any, labels: Any) -> list[Outcome]:
    """Predictions that are ``ratio`` times too large."""
    found = []
    for seed in range(2):
        for i, level in enumerate(settings.levels):
            rmse = errors[seed, i]
            place = {"row": "row", "seed": f"seed {seed}", "images": "all"}
            columns = {
                "rmse": rmse.tolist(),
                "mse": (rmse**2).tolist(),
                "psnr": (-20 * np.log10(rmse)).tolist(),
                "ssim": (1 - rmse).tolist(),
                "lpips_squeeze": [math.nan] * len(rmse),
                "label": labels.tolist(),
            }
            words = ["ok"] * len(rmse)
            found.append(
                outcome({**place, "what": "A", "level": level}, columns, words)
            )
        if settings.predictions:
            columns = {
                f"I at {level}": (ratio * errors[seed, i]).tolist()
                for i, level in enumerate(settings.levels)
            }
            found.append(
                outcome({**place, "what": "predictions", "level": ""}, columns)
            )
    return found


def test_predictions_are_compared_with_errors() -> None:
    settings = perturbed(
        Prediction,
        predictions={"I": Influence("i2f")},
        metrics=("rmse", "ssim", "lpips_squeeze"),
    )
    errors = np.random.default_rng(0).uniform(0.01, 0.5, (2, 2, 20))
    summary = settings.summarise(made_up(settings, 2.0, errors, np.arange(20) % 10))
    found = entries(summary)
    assert found["row", "I", "ρ rmse"] == pytest.approx(1)
    assert found["row", "I", "ρ rmse, within a level"] == pytest.approx(1)
    assert found["row", "I", "ρ ssim"] == pytest.approx(-1)
    assert found["row", "I", "ρ lpips_squeeze"] is None
    assert found["row", "I", "too large by, dB"] == pytest.approx(6.0206, abs=1e-3)
    assert found["row", "I", "share below"] == 0
    assert "80 of 80 attacks matched" in summary.notes[0]


def test_unfairness_between_classes_is_told_from_chance() -> None:
    settings = perturbed(Fairness)
    labels = np.arange(20) % 2
    stream = np.random.default_rng(0)
    noise = stream.normal(0, 0.05, (2, 2, 20))
    errors = 10 ** (-1 + 0.5 * labels + noise)
    found = entries(settings.summarise(made_up(settings, 1, errors, labels)))
    share, chance = (
        found["row", column, ""]
        for column in ("share between classes", "by chance, up to")
    )
    assert share is not None
    assert chance is not None
    assert share > 0.9 > chance
    assert found["row", "most exposed class", ""] == 0
    assert found["row", "best protected", ""] == 1
    alike = 10 ** (-1 + stream.normal(0, 0.3, (2, 2, 20)))
    found = entries(settings.summarise(made_up(settings, 1, alike, labels)))
    share, chance = (
        found["row", column, ""]
        for column in ("share between classes", "by chance, up to")
    )
    assert share is not None
    assert chance is not None
    assert share < chance
    quantiles = np.quantile(np.log10(alike**2), [0.1, 0.9], axis=-1)
    expected = (10 ** (quantiles[1] - quantiles[0])).mean()
    assert found["row", "90th by 10th percentile", ""] == pytest.approx(expected, 1e-4)


def test_levels_are_medians() -> None:
    settings = perturbed(Levels, predictions={"I": Influence("i2f")})
    errors = np.random.default_rng(0).uniform(0.01, 0.5, (2, 2, 20))
    found = entries(settings.summarise(made_up(settings, 3.0, errors, np.zeros(20))))
    assert found["row", "A, rmse", ""] == pytest.approx(np.median(errors), rel=1e-4)
    assert found["row", "I", ""] == pytest.approx(3 * np.median(errors), rel=1e-4)


# -- eigenvalues -------------------------------------------------------------------


def rows(kind: Any, **more: Any) -> Any:
    common = {
        "rows": {"row": EigenRow(DIGITS, "net")},
        "networks": {"net": Network("linear")},
        "images": 2,
        "seeds": 1,
    }
    return kind(**(common | more))


def test_eigenvalues_are_those_of_the_dense_jacobian(lab_of: Any) -> None:
    settings = rows(Eigenvalues)
    cell = settings.cells(lab_of(settings))[0]
    net, samples = small_net(), small_samples()
    found = cell.call(net, samples)
    weights = {name: p.detach().double() for name, p in net.named_parameters()}
    for i in range(4):

        def shared(pixels: torch.Tensor, i: int = i) -> torch.Tensor:
            def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
                logits = torch.func.functional_call(net, weights, (pixels - 0.4) / 0.3)
                return nn.functional.cross_entropy(logits, samples.y[i : i + 1])

            parts = torch.func.grad(loss)(weights)
            return torch.cat([parts[name].flatten() for name in weights])

        pixels = samples.x[i : i + 1].double() * 0.3 + 0.4
        j = torch.func.jacrev(shared)(pixels).flatten(1)
        values = torch.linalg.svdvals(j).square()
        assert found.columns["λ 1"][i] == pytest.approx(float(values[0]), rel=1e-5)
        middle = float(values.quantile(0.5))
        assert found.columns["λ 0.5"][i] == pytest.approx(middle, rel=1e-4)
        share = float((values < 0.01).double().mean())
        assert found.columns["small"][i] == pytest.approx(share)


def test_the_slope_of_an_error_that_falls_as_the_eigenvalue() -> None:
    settings = rows(
        Eigenvectors,
        attacks={"A": AttackSettings("lavp-l2", steps=2)},
        directions=(0, 5),
        sizes=(0.5,),
        images=6,
    )
    stream = np.random.default_rng(0)
    columns: dict[str, Any] = {"1/d_x": [1 / 784] * 6}
    for k in (0, 5):
        lam = stream.uniform(0.1, 10, 6)
        columns[f"λ {k}"] = lam.tolist()
        columns[f"A, ‖δ‖ = 0.5: {k}"] = (0.25 / lam / 784).tolist()
    status = {"A, ‖δ‖ = 0.5": ["ok"] * 6 + ["failed"] * 6}
    summary = settings.summarise([Outcome({"row": "row"}, columns, status, 0.0)])
    assert "6 of 12 attacks matched" in summary.notes[0]
    found = entries(summary)
    assert found["row, A, ‖δ‖ = 0.5", "slope", ""] == pytest.approx(-1)
    assert found["row, A, ‖δ‖ = 0.5", "off 1/λ, dB", ""] == pytest.approx(0, abs=1e-9)


def test_noise_along_an_eigenvector_has_its_size(lab_of: Any) -> None:
    settings = rows(
        Eigenvectors,
        attacks={
            "A": AttackSettings(
                "gauss-newton", steps=20, restarts=1, start="near", radius=0.01
            )
        },
        directions=(0, 3),
        sizes=(1e-3,),
    )
    call = settings.cells(lab_of(settings))[0].call
    net, samples = small_net(), small_samples()
    found = call(net, samples, (0, 3), (1e-3,), settings.attacks)
    for k in (0, 3):
        expected = 1e-6 / np.array(found.columns[f"λ {k}"]) / 16
        got = np.array(found.columns[f"A, ‖δ‖ = 0.001: {k}"])
        # First order, in float32.
        np.testing.assert_allclose(got, expected, rtol=0.1)


def test_effort_counts_what_is_needed(lab_of: Any) -> None:
    settings = rows(
        Effort,
        attacks={"A": AttackSettings("lavp-l2", steps=40, restarts=1)},
        iterations=60,
    )
    power, attacked = (c.call for c in settings.cells(lab_of(settings))[:2])
    net, samples = small_net(), small_samples().part(0, 1)
    found = power(net, samples, 60)
    assert all(1 <= n <= 60 for n in found.columns["iterations"])
    one = settings.attacks["A"]
    other = attacked(net, samples, one)
    assert all(0 < n <= 40 for n in other.columns["iterations"])
    assert all(s >= 0 for s in (*found.columns["seconds"], *other.columns["seconds"]))


# -- weight updates ----------------------------------------------------------------


def updates(kind: Any, **more: Any) -> Any:
    common = {
        "rows": {"row": UpdateRow("net", DIGITS, epochs=2, samples=4, batch=2, lr=0.1)},
        "networks": {"net": Network("mlp", {"hidden_sizes": [8]})},
        "clients": 2,
        "seeds": 1,
    }
    return kind(**(common | more))


def of_clients(lab: Lab, settings: Any) -> tuple[nn.Module, torch.Tensor, Any, Samples]:
    """Network, images and updates, by the same order of digits."""
    need = settings.needed()[0]
    samples = lab.data[DIGITS].samples(8)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    x, y = samples.x[order].view(2, 4, 1, 28, 28), samples.y[order].view(2, 4)
    how = LocalTraining(2, 2, 0.1)
    net = lab.net(need)
    sent = [
        train_client(net, x[i], y[i], how, client=i, seed=0, record="full")
        for i in range(2)
    ]
    return net, x, sent, samples


def test_attacks_on_updates_are_those_of_the_public_functions(lab_of: Any) -> None:
    settings = updates(
        UpdateAttacks,
        attacks={
            "SME": UpdateAttackSettings("sme", steps=5),
            "IG": UpdateAttackSettings("ig-update", steps=5),
            "DLFA": UpdateAttackSettings("dlfa", steps=2, most=1),
        },
        difference=("SME", "IG"),
    )
    lab = lab_of(settings)
    cells = settings.cells(lab)
    assert [cell.place["what"] for cell in cells] == ["SME", "IG"]
    outcomes = [
        outcome(cell.place, found.columns, found.status["attack"])
        for cell in cells
        for found in [cell.call(*cell.arguments)]
    ]
    net, x, sent, samples = of_clients(lab, settings)
    expected = {}
    for name, preset in (("SME", "sme"), ("IG", "ig-update")):
        rec = attack_update(
            net,
            client_updates(sent)[0],
            preset,
            steps=5,
            mean=samples.mean,
            std=samples.std,
        )
        ours = align(rec.images, x).flatten(0, 1)
        got = quality(ours, x.flatten(0, 1), mean=samples.mean, std=samples.std)
        expected[name] = got["psnr"].view(2, 4).mean(1)
    summary = settings.summarise(outcomes)
    found = entries(summary)
    for name, values in expected.items():
        assert found["row", name, "PSNR"] == pytest.approx(float(values.mean()), 1e-5)
    apart = float((expected["SME"] - expected["IG"]).mean())
    assert found["row", "SME − IG", "PSNR"] == pytest.approx(apart, abs=1e-4)
    assert "row: DLFA was not run." in summary.notes


def test_paths_are_those_of_the_public_functions(lab_of: Any) -> None:
    settings = updates(UpdatePaths)
    lab = lab_of(settings)
    (cell,) = settings.cells(lab)
    columns = cell.call(*cell.arguments).columns
    net, _, sent, _ = of_clients(lab, settings)
    for i, one in enumerate(sent):
        assert one.recorded is not None
        least = principal_subspace(one.recorded).worst
        segment = segment_similarity(net, one, points=11)
        assert columns["least in the plane"][i] == pytest.approx(least)
        assert columns["cos at w_0"][i] == pytest.approx(segment.at_start)
        assert columns["best cos"][i] == pytest.approx(segment.best)
    found = entries(settings.summarise([outcome(cell.place, columns)]))
    mean = np.mean(columns["best cos"])
    assert found["row", "best cos", ""] == pytest.approx(mean, rel=1e-5)


def test_costs_are_hours_of_a_hundred_attacks(lab_of: Any) -> None:
    settings = updates(
        UpdateCosts,
        attacks={
            "DLFA": UpdateAttackSettings("dlfa"),
            "SME": UpdateAttackSettings("sme"),
        },
        calls=2,
        ratio=("DLFA", "SME"),
    )
    places = [cell.place for cell in settings.cells(lab_of(settings))]
    outcomes = [
        outcome(place, {"hours": [hours]})
        for place, hours in zip(places, (6.0, 1.5), strict=True)
    ]
    found = entries(settings.summarise(outcomes))
    assert found["row", "DLFA / SME", "hours"] == 4
    cell = settings.cells(lab_of(settings))[1]
    (hours,) = cell.call(*cell.arguments).columns["hours"]
    assert 0 < hours < 10


# -- batches -----------------------------------------------------------------------


def test_a_batch_is_set_beside_its_originals_in_any_order(
    lab_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Batches(
        DIGITS,
        {"A": AttackSettings("inverting-gradients", steps=2)},
        {"net": Network("linear")},
        batch=3,
        metrics=("psnr",),
        seeds=1,
    )
    (cell,) = settings.cells(lab_of(settings))
    whole = cell.arguments[1]

    class Shuffled:
        images = whole.x.flip(0)[None]
        status = ()

    monkeypatch.setattr(AttackSettings, "run", lambda *a, **k: Shuffled())
    found = cell.call(*cell.arguments)
    assert min(found.columns["psnr"]) > 100
    assert len({int(v) for v in whole.y}) == 3


def test_more_than_one_network_is_refused() -> None:
    with pytest.raises(ValueError, match="give one network, got 2"):
        Batches(DIGITS, {}, {"a": Network("linear"), "b": Network("mlp")}, batch=2)
