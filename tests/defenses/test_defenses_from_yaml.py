from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import ClassVar

import pytest
import yaml
from jsonargparse import ArgumentParser
from torch import Generator, Tensor

from leakwatch.callbacks import GradientDefense
from leakwatch.defenses import (
    DPSGD,
    Budget,
    Defense,
    EigenNoise,
    GaussianNoise,
    GradientPruning,
    MixUp,
    Needs,
    RowNorms,
    Samples,
    Shared,
    ShippedDefense,
    Smallest,
    register_defense,
    registered_defenses,
    registry,
)
from leakwatch.studies.trade_offs.grid import named_defenses

BUDGET = "budget: {value: 0.1, unit: relative}"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (f"GaussianNoise, init_args: {{{BUDGET}}}", GaussianNoise(Budget(0.1))),
        (
            "GradientPruning, init_args: {share: 0.4, scope: layer}",
            GradientPruning(0.4, "layer"),
        ),
        (
            f"EigenNoise, init_args: {{{BUDGET}, allocation: smallest}}",
            EigenNoise(Budget(0.1), "smallest"),
        ),
        (
            f"EigenNoise, init_args: {{{BUDGET}, allocation: {{class_path: "
            "leakwatch.defenses.Smallest, init_args: {k: 3}}}",
            EigenNoise(Budget(0.1), Smallest(3)),
        ),
        (
            f"EigenNoise, init_args: {{{BUDGET}, allocation: {{class_path: "
            "leakwatch.defenses.RowNorms, init_args: {probes: 8}}}",
            EigenNoise(Budget(0.1), RowNorms(8)),
        ),
        ("DPSGD, init_args: {clip: 1.0, noise_multiplier: 0.5}", DPSGD(1.0, 0.5)),
        ("MixUp, init_args: {coefficient: 0.7}", MixUp(0.7)),
    ],
)
def test_defenses_are_made_from_yaml(settings: str, expected: Defense) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--defense", type=ShippedDefense)
    text = f"defense: {{class_path: leakwatch.defenses.{settings}}}"
    parsed = parser.parse_object(yaml.safe_load(text))
    make = getattr(parser, "instantiate", None) or parser.instantiate_classes
    found = make(parsed).defense
    assert type(found) is type(expected)
    if not isinstance(expected, MixUp):
        assert found == expected


@dataclass(frozen=True)
class Rounding(Defense):
    """Somebody's own: rounds every entry to a multiple of one step."""

    budget: Budget
    box: float = 0.0
    name: ClassVar[str] = "rounding"
    needs: ClassVar[Needs] = "gradient"

    def protect(
        self, gradient: Tensor, *, generator: Generator, samples: Samples | None = None
    ) -> Shared:
        size = gradient.shape[1]
        total = self.budget.variance(gradient.norm(dim=1), size)
        step = (12 * total / size).sqrt()[:, None].to(gradient)
        return Shared.fixed((gradient / step).round() * step, gradient)


def test_a_defense_of_ones_own_goes_by_its_class_path() -> None:
    text = f"class_path: {__name__}.Rounding, init_args: {{{BUDGET}}}"
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(GradientDefense, "callback")
    parsed = parser.parse_object(yaml.safe_load(f"callback: {{defense: {{{text}}}}}"))
    make = getattr(parser, "instantiate", None) or parser.instantiate_classes
    assert make(parsed).callback.defense == Rounding(Budget(0.1))


def test_a_registered_defense_goes_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_DEFENSES", {})
    register_defense("rounding", Rounding)
    assert registered_defenses() == ("rounding",)
    make = named_defenses(["rounding"], directions=3, box=0.5)["rounding"]
    assert make(Budget(0.2)) == Rounding(Budget(0.2), box=0.5)
    with pytest.raises(ValueError, match="'rounding' is already registered"):
        register_defense("rounding", GaussianNoise)
    with pytest.raises(ValueError, match="did you mean 'rounding'"):
        named_defenses(["roundin"], directions=3, box=0.5)


def test_a_trade_off_takes_a_defense_by_its_class_path() -> None:
    name = f"{__name__}.Rounding"
    make = named_defenses([name], directions=3, box=0.5)[name]
    assert make(Budget(0.2)) == Rounding(Budget(0.2), box=0.5)
    with pytest.raises(ValueError, match=r"unknown defense 'nowhere\.Rounding'"):
        named_defenses(["nowhere.Rounding"], directions=3, box=0.5)


def test_every_public_name_is_there() -> None:
    module = importlib.import_module("leakwatch.defenses")
    assert module.__all__ == sorted(module.__all__, key=_case)
    for name in module.__all__:
        assert getattr(module, name) is not None


def _case(name: str) -> tuple[int, str]:
    """Constants, classes, functions, as the formatter orders them."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)
