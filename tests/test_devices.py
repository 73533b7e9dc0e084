"""Networks, samples and what comes with them on different devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks.gauss_newton.gauss_newton_problems import SHAPE, net, samples
from cases import Elsewhere, elsewhere
from monitor_cases import Tiny, loader, monitor, rows_of, trainer
from torch import Tensor, nn

import leakwatch
from leakwatch.attacks import Start
from leakwatch.callbacks import GradientDefense, InversionAudit, LeakageMonitor
from leakwatch.defenses import (
    Budget,
    Defense,
    EigenNoise,
    GaussianNoise,
    GradientPruning,
    Samples,
    Smallest,
    perturbation,
)
from leakwatch.quality import quality

Call = Callable[[nn.Module, Tensor, Tensor, Any], object]
PIXEL_SCALE = {"mean": [0.4], "std": [0.25]}


def _delta(at: nn.Module, x: Tensor) -> Tensor:
    size = sum(p.numel() for p in at.parameters())
    return 1e-3 * torch.ones(len(x), size)


def _scored(at: nn.Module, x: Tensor, y: Tensor, place: Any) -> object:
    return leakwatch.score(at, x, y, noise_std=1e-3, **PIXEL_SCALE)


def _scored_with_a_delta(at: nn.Module, x: Tensor, y: Tensor, place: Any) -> object:
    return leakwatch.score(
        at,
        x,
        y,
        delta=place(_delta(at, x)),
        prior_mean=place(torch.full(SHAPE, 0.4)),
        prior=torch.eye(x[0].numel(), dtype=torch.float64),
        **PIXEL_SCALE,
    )


def _attacked(at: nn.Module, x: Tensor, y: Tensor, place: Any) -> object:
    return leakwatch.attack(
        at, x, y, "lavp-l2", start="near", steps=2, noise_std=1e-3, **PIXEL_SCALE
    )


def _attacked_from_a_start(at: nn.Module, x: Tensor, y: Tensor, place: Any) -> object:
    return leakwatch.attack(
        at,
        x,
        y,
        "lavp-l2",
        start=Start.near(x, 0.1),
        perturb=lambda g: place(0.9 * g.cpu()),
        steps=2,
        **PIXEL_SCALE,
    )


def _attributed(at: nn.Module, x: Tensor, y: Tensor, place: Any) -> object:
    return leakwatch.layer_attribution(at, x, y)


CALLS = [
    _scored,
    _scored_with_a_delta,
    _attacked,
    _attacked_from_a_start,
    _attributed,
]


def _name(call: Call) -> str:
    return call.__name__.strip("_")


@pytest.mark.parametrize("call", CALLS, ids=_name)
def test_samples_are_moved_before_the_network_meets_them(call: Call) -> None:
    x, y = elsewhere(*samples(2))
    call(net().double(), x, y, lambda t: elsewhere(t)[0])


@pytest.mark.parametrize("call", CALLS, ids=_name)
def test_samples_on_the_cpu_and_a_network_on_any_device(
    call: Call, device: str
) -> None:
    x, y = samples(2)
    call(net().to(device), x.float(), y, lambda t: t)


@pytest.mark.parametrize("scale", [{}, PIXEL_SCALE], ids=["pixels", "normalised"])
def test_originals_on_another_device_than_reconstructions(scale: Any) -> None:
    x = torch.rand(2, *SHAPE)
    if scale:
        x = (x - 0.4) / 0.25
    measured = quality(x, elsewhere(x.clone())[0], metrics=["mse"], **scale)
    assert measured["mse"].tolist() == [0.0, 0.0]


def test_what_is_elsewhere_meets_nothing_before_it_is_moved() -> None:
    x = elsewhere(torch.ones(2, 3))[0]
    with pytest.raises(RuntimeError, match="linear got tensors of two devices"):
        nn.Linear(3, 3)(x)
    assert isinstance(x.double().detach(), Elsewhere)
    assert not isinstance(x.detach().to(torch.device("cpu")), Elsewhere)


# -- what users call gives the same everywhere ----------------------------------


def _numbers(found: Any) -> dict[str, Tensor]:
    """All numbers of a result, on the CPU."""
    if isinstance(found, dict):
        return {k: torch.as_tensor(v).double().cpu() for k, v in found.items()}
    return {k: v.double().cpu() for k, v in found.numbers.items()}


def _found(
    device: str, act: Callable[[nn.Module, Tensor, Tensor], Any], n: int = 2
) -> dict[str, Tensor]:
    x, y = samples(n)
    return _numbers(act(net().double().to(device), x.to(device), y.to(device)))


def _same_everywhere(
    device: str, act: Callable[[nn.Module, Tensor, Tensor], Any], rtol: float = 1e-6
) -> None:
    here, there = _found("cpu", act), _found(device, act)
    assert here.keys() == there.keys()
    for name, numbers in here.items():
        torch.testing.assert_close(
            there[name], numbers, rtol=rtol, atol=1e-9, equal_nan=True, msg=name
        )


@pytest.mark.parametrize("solver", ["exact", "lanczos", "power"])
def test_scores_are_the_same_on_every_device(solver: Any, device: str) -> None:
    statuses = []

    def act(at: nn.Module, x: Tensor, y: Tensor) -> object:
        found = leakwatch.score(
            at,
            x,
            y,
            ["lavp", "i2f", "bayes", "norms"],
            noise_std=1e-2,
            solver=solver,
            dtype=torch.float64,
            **PIXEL_SCALE,
        )
        statuses.append({k: [s.word for s in v] for k, v in found.status.items()})
        return found

    _same_everywhere(device, act)
    assert statuses[0] == statuses[1]


@pytest.mark.parametrize(
    "preset", ["dlg", "inverting-gradients", "lavp-l2", "gauss-newton", "combined"]
)
def test_attacks_are_the_same_on_every_device(preset: str, device: str) -> None:
    def act(at: nn.Module, x: Tensor, y: Tensor) -> object:
        found = leakwatch.attack(
            at,
            x,
            y,
            preset,
            steps=2,
            restarts=1,
            dtype=torch.float64,
            **PIXEL_SCALE,
        )
        return {"images": found.images, "relative": found.relative}

    _same_everywhere(device, act, rtol=1e-4)


DEFENSES: dict[str, Defense] = {
    "gaussian": GaussianNoise(Budget(1e-2, "relative")),
    "pruning": GradientPruning(0.5),
    "eigen": EigenNoise(Budget(1e-2, "relative"), Smallest(3)),
}


@pytest.mark.parametrize("name", DEFENSES)
def test_defenses_are_the_same_on_every_device(name: str, device: str) -> None:
    def act(at: nn.Module, x: Tensor, y: Tensor) -> object:
        gradients = leakwatch.GradientMap(at, dtype=torch.float64)
        known = Samples(gradients, x, y)
        generator = torch.Generator().manual_seed(0)
        perturb = perturbation(DEFENSES[name], generator, known)
        moved = perturb(gradients(x, y)) - gradients(x, y)
        return {"norm": moved.norm(dim=1)}

    _same_everywhere(device, act)


def test_studies_and_tables_are_the_same_on_every_device(device: str) -> None:
    def act(at: nn.Module, x: Tensor, y: Tensor) -> object:
        table = leakwatch.layer_attribution(at, x, y, dtype=torch.float64)
        noise = leakwatch.recommend_noise(at, x, y, check=0, **PIXEL_SCALE)
        return {"traces": table.trace, "noise": noise.noise_std}

    _same_everywhere(device, act)


WATCHING: dict[str, Callable[[], Any]] = {
    "monitor": monitor,
    "audit": lambda: InversionAudit(
        probes=3, attack="lavp-l2", steps=2, samples=2, every_n_epochs=1, report=False
    ),
    "defense": lambda: GradientDefense(GaussianNoise(Budget(1e-2, "relative"))),
}


@pytest.mark.parametrize("name", WATCHING)
def test_callbacks_work_on_every_device(name: str, device: str, tmp_path: Path) -> None:
    module, watching = Tiny(), WATCHING[name]()
    kind = "gpu" if device == "cuda" else "cpu"
    trainer(tmp_path, watching, accelerator=kind).fit(module, loader())
    assert all(bool(torch.isfinite(p).all()) for p in module.parameters())
    if name != "defense":
        rows = [r for r in rows_of(watching) if r.quantity == "lavp_l2_max"]
        assert rows
        assert {row.status for row in rows} == {"ok"}


@pytest.mark.filterwarnings("ignore:GPU available but not used")
@pytest.mark.parametrize("make", [LeakageMonitor, InversionAudit])
def test_a_device_without_float64_is_refused_before_training(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    training = trainer(tmp_path)
    monkeypatch.setattr(
        type(training.strategy), "root_device", property(lambda _: torch.device("mps"))
    )
    with pytest.raises(RuntimeError, match=r"has chosen 'mps'.*accelerator='cpu'"):
        make().setup(training, Tiny(), "fit")
