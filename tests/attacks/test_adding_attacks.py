"""A new attack is one class and one line; everything finds it by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakwatch import WeightUpdate, attack, attack_update
from leakwatch.attacks import (
    GradientAttack,
    GradientTask,
    Preset,
    SearchResult,
    UpdateAttack,
    UpdatePreset,
    UpdateTask,
    presets,
    register_attack,
    register_update_attack,
)
from leakwatch.attacks.updates import presets as update_presets
from leakwatch.callbacks import InversionAudit, UpdateAudit
from leakwatch.studies.paper_attacks import engine


@dataclass(frozen=True)
class Guess(GradientAttack):
    """Returns its first images."""

    name: str = "guess"
    steps: int = 1

    def search(self, task: GradientTask) -> SearchResult:
        images = task.first_images()
        loss = task.mismatch(images)
        return SearchResult(images, loss, torch.full_like(loss, self.steps).long())

    def check(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            raise ValueError("guessing needs more than one layer.")


@dataclass(frozen=True)
class UpdateGuess(UpdateAttack):
    """Returns its first images."""

    name: str = "update-guess"
    steps: int = 1

    def search(self, task: UpdateTask) -> SearchResult:
        images = task.first_images()
        loss = torch.ones(images.shape[:2], dtype=torch.float64)
        return SearchResult(images, loss, torch.full_like(loss, self.steps).long())


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both, and what is registered is forgotten afterwards."""
    for registry in (presets._PRESETS, update_presets._PRESETS):
        monkeypatch.setattr(registry, "_presets", dict(registry._presets))
    register_attack(Preset(Guess(), start="uniform", restarts=2, source="here"))
    register_update_attack(UpdatePreset(UpdateGuess(), restarts=3, source="here"))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 3))


def samples() -> tuple[Tensor, Tensor]:
    return torch.rand(2, 1, 3, 3), torch.tensor([0, 2])


def test_an_attack_is_found_by_its_name_everywhere() -> None:
    result = attack(network(), *samples(), "guess", steps=4, data_range=1.0)
    assert (result.attack, result.start) == ("guess", "uniform")
    assert result.restart_loss.shape == (2, 2)
    assert result.iterations.tolist() == [4, 4]
    assert result.images.min() >= 0
    assert result.status[0].word == "not converged"
    audit = InversionAudit(attack="guess", steps=3)
    assert audit.audit.attacks["random"] == Guess(steps=3)
    assert audit.audit.restarts == 2
    assert engine("guess", 5) == Guess(steps=5)


def test_an_attack_on_updates_is_found_by_its_name_everywhere() -> None:
    net = network()
    before = torch.cat([p.detach().flatten() for p in net.parameters()])
    labels = torch.tensor([[0, 2]])
    update = WeightUpdate(before, before[None] + 0.1, labels, (1, 3, 3), samples=2)
    result = attack_update(net, update, "update-guess", steps=4, data_range=1.0)
    assert result.attack == "update-guess"
    assert result.images.shape == (1, 2, 1, 3, 3)
    assert result.restart_loss.shape == (3, 1)
    assert bool(result.alpha.isnan().all())
    assert UpdateAudit(attack="update-guess").plan.attack == UpdateGuess()


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="attack named 'guess' is registered already"):
        register_attack(Preset(Guess()))
    with pytest.raises(ValueError, match="updates named 'update-guess' is registered"):
        register_update_attack(UpdatePreset(UpdateGuess()))


def test_an_attack_without_a_name_is_not_registered() -> None:
    class Undecorated(Guess):
        pass

    with pytest.raises(ValueError, match="a Undecorated has no name to be found by"):
        register_attack(Preset(Undecorated(name="")))


@pytest.mark.parametrize(
    "asked",
    [
        lambda: attack(network(), *samples(), "gues"),
        lambda: InversionAudit(attack="gues"),
        lambda: engine("gues", 3),
    ],
)
def test_an_unknown_name_lists_what_is_registered(asked: Any) -> None:
    with pytest.raises(
        ValueError, match=r"unknown attack 'gues'; did you mean 'guess'. choose"
    ):
        asked()


def test_settings_of_a_new_attack_are_changed_by_name() -> None:
    assert Guess().changed(steps=7, name="other") == Guess(steps=7, name="other")
    with pytest.raises(
        ValueError, match="unknown setting lr of attack 'guess'; choose"
    ):
        Guess().changed(lr=1)


def test_an_attack_refuses_networks_that_it_cannot_work_on() -> None:
    x, y = torch.rand(2, 4), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="more than one layer"):
        attack(nn.Linear(4, 2), x, y, "guess")


def test_an_attack_with_latents_begins_nowhere_else() -> None:
    with pytest.raises(ValueError, match=r"not at start 'zeros'; use Start\.normal"):
        attack(network(), *samples(), "ci-net", start="zeros", data_range=1.0)
