from __future__ import annotations

import importlib

import pytest
import yaml
from jsonargparse import ArgumentParser

from leakwatch.defenses import (
    DPSGD,
    Budget,
    Defense,
    EigenNoise,
    GaussianNoise,
    GradientPruning,
    MixUp,
    RowNorms,
    ShippedDefense,
    Smallest,
)

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


def test_every_public_name_is_there() -> None:
    module = importlib.import_module("leakwatch.defenses")
    assert module.__all__ == sorted(module.__all__, key=_case)
    for name in module.__all__:
        assert getattr(module, name) is not None


def _case(name: str) -> tuple[int, str]:
    """Constants, classes, functions, as the formatter orders them."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)
