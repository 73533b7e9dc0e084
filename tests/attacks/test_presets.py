from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import leakwatch.attacks
from leakwatch.attacks import FirstOrder, Preset, Start, attack
from leakwatch.attacks.presets import available, get, register


def net(channels: int = 1) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(channels, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Sigmoid(),
            nn.Flatten(),
            nn.Linear(100, 3),
        )


def data(n: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(n, 1, 5, 5, generator=generator), torch.arange(n) % 3


def test_the_field_s_names_are_there() -> None:
    names = {
        "dlg",
        "idlg",
        "inverting-gradients",
        "gradinversion-bn",
        "lavp-l2",
        "lavp-cosine",
        "gauss-newton",
        "coarse-to-fine",
        "combined",
        "ci-net",
    }
    assert names <= set(available())
    for name in available():
        assert get(name).source
        assert get(name).name == name


@pytest.mark.parametrize(
    ("name", "distance", "optimizer", "signed", "restarts"),
    [
        ("dlg", "l2", "lbfgs", False, 1),
        ("idlg", "l2", "lbfgs", False, 1),
        ("inverting-gradients", "cosine", "adam", True, 1),
        ("gradinversion-bn", "l2", "adam", False, 1),
        ("lavp-l2", "l2", "adam", False, 3),
        ("lavp-cosine", "cosine", "adam", False, 3),
    ],
)
def test_presets_have_the_published_settings(
    name: str, distance: str, optimizer: str, signed: bool, restarts: int
) -> None:
    engine = get(name).attack
    assert isinstance(engine, FirstOrder)
    assert (engine.distance, engine.optimizer, engine.signed) == (
        distance,
        optimizer,
        signed,
    )
    assert get(name).restarts == restarts


@pytest.mark.parametrize(
    "name",
    [
        "dlg",
        "idlg",
        "inverting-gradients",
        "lavp-l2",
        "gauss-newton",
        "coarse-to-fine",
        "combined",
        "ci-net",
    ],
)
def test_every_preset_runs_in_one_call(name: str) -> None:
    x, y = data()
    found = attack(net(), x, y, name, steps=5, data_range=1.0)
    assert found.images.shape == x.shape
    assert found.attack == name
    assert len(found.status) == 2


def test_gradinversion_needs_batchnorm_and_says_so() -> None:
    x, y = data()
    found = attack(net(), x, y, "gradinversion-bn", steps=3, data_range=1.0)
    assert bool(torch.isfinite(found.loss).all())
    plain = nn.Sequential(nn.Flatten(), nn.Linear(25, 3))
    with pytest.raises(ValueError, match="batch_norm=0"):
        attack(plain, x, y, "gradinversion-bn", steps=3)
    attack(plain, x, y, "gradinversion-bn", steps=3, batch_norm=0.0)


def test_one_call_can_do_what_the_engine_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    x, y = data(4)
    options: dict[str, Any] = {"steps": 4, "restarts": 2, "tv": 0.0}
    found = attack(
        net(),
        (x - 0.4) / 0.2,
        y,
        start="near",
        radius=0.05,
        images=2,
        mean=[0.4],
        std=[0.2],
        labels="inferred",
        noise_std=1e-3,
        perturb=lambda g: g * 1.0,
        progress=True,
        **options,
    )
    assert found.images.shape == (2, 2, 1, 5, 5)
    assert found.restart_loss.shape == (2, 2)
    assert (found.start, found.practical) == ("near", False)
    assert "attack: step 4/4, best distance" in capsys.readouterr().err
    quiet = attack(net(), x, y, start=Start.zeros(), steps=2)
    assert quiet.start == "zeros"
    assert capsys.readouterr().err == ""


def test_the_seed_decides_everything() -> None:
    x, y = data()
    options: dict[str, Any] = {"steps": 5, "noise_std": 1e-2, "path": "vmap"}
    first = attack(net(), x, y, seed=1, **options)
    again = attack(net(), x, y, seed=1, **options)
    other = attack(net(), x, y, seed=2, **options)
    torch.testing.assert_close(first.images, again.images, rtol=0, atol=0)
    assert not torch.equal(first.images, other.images)


def test_attack_objects_are_taken_as_they_are() -> None:
    x, y = data()
    mine = FirstOrder(name="mine", steps=7)
    assert attack(net(), x, y, mine).attack == "mine"
    assert int(attack(net(), x, y, mine, steps=2).iterations.max()) == 2

    class Own:
        name = "own"

        def run(self, gradients: Any, shared: Any, **options: Any) -> Any:
            return FirstOrder(name="own", steps=1).run(gradients, shared, **options)

    assert attack(net(), x, y, Own()).attack == "own"
    with pytest.raises(ValueError, match="can't be changed"):
        attack(net(), x, y, Own(), steps=3)
    with pytest.raises(TypeError, match="with a run method"):
        attack(net(), x, y, 3)  # type: ignore[arg-type]


def test_bad_calls_are_refused() -> None:
    x, y = data()
    with pytest.raises(ValueError, match="unknown attack 'nonsense'; choose from dlg"):
        attack(net(), x, y, "nonsense")
    with pytest.raises(ValueError, match="unknown setting nonsense"):
        attack(net(), x, y, nonsense=1)
    with pytest.raises(ValueError, match="'known' or 'inferred'"):
        attack(net(), x, y, labels="guessed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="outside the network's classes"):
        attack(net(), x, y + 2)
    with pytest.raises(ValueError, match="registered already"):
        register(Preset(FirstOrder(name="dlg"), "normal", 1, "nowhere"))


def test_public_names_are_there() -> None:
    for name in leakwatch.attacks.__all__:
        assert getattr(leakwatch.attacks, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        leakwatch.attacks.nonsense  # noqa: B018
