from __future__ import annotations

from dataclasses import replace

import pytest

from leakwatch.scores import (
    SampleSpectrum,
    Settings,
    Value,
    available,
    get,
    groups,
    register,
    resolve,
    scored,
)


def test_groups() -> None:
    assert groups()["lavp"] == (
        "lavp_l2_max",
        "lavp_l2_min",
        "lavp_cos_max",
        "lavp_cos_min",
        "lavp_fusion",
    )
    assert set().union(*groups().values()) == set(available())


def test_get_and_resolve_when_a_group_bears_the_name_of_a_score() -> None:
    assert get("i2f").name == "i2f"
    assert [s.name for s in resolve("i2f")] == list(groups()["i2f"])
    assert [s.name for s in resolve([get("i2f")])] == ["i2f"]
    with pytest.raises(ValueError, match="unknown score 'lavp'; choose from groups"):
        get("lavp")


def test_order_without_repetition() -> None:
    names = [s.name for s in resolve(["loss", "lavp_cos_min", "lavp", "loss"])]
    assert names[:3] == ["loss", "lavp_cos_min", "lavp_l2_max"]
    assert len(names) == len(set(names)) == 6


@pytest.mark.usefixtures("own_registry")
def test_names_are_taken_once() -> None:
    with pytest.raises(ValueError, match="'i2f_lb' is registered already"):
        register(get("i2f_lb"))
    with pytest.raises(ValueError, match="'lavp' is registered already"):
        register(replace(get("loss"), name="lavp"))
    with pytest.raises(ValueError, match="'loss' is the name of a score, so it can't"):
        register(replace(get("loss"), name="new"), "loss")
    assert "new" not in available()
    register(replace(get("loss"), name="new"), "new", "norms")
    assert groups()["new"] == ("new",)
    assert groups()["norms"][-1] == "new"


@pytest.mark.parametrize("name", available())
def test_every_score_explains_itself(name: str) -> None:
    entry = get(name)
    assert entry.meaning.endswith(".")
    assert "  " not in entry.meaning
    assert entry.unit
    assert entry.source
    assert entry.compute.__doc__


def test_directions() -> None:
    """Errors and curvatures: large is safe, says the source. The rest: large leaks."""
    errors = {"i2f", "i2f_lb", "i2f_nom", "i2f_bayes", "i2f_range", *groups()["lavp"]}
    for name in available():
        safer = get(name).direction == "higher = less exposed"
        assert safer == (name in errors), name


@pytest.mark.usefixtures("own_registry")
def test_a_formula_becomes_the_score_of_its_own_name() -> None:
    @scored(
        "mine",
        needs={"lambda_max"},
        unit="gradient / pixel",
        direction="higher = more exposed",
        meaning="Steepest rise of the gradient.",
        source="this test",
    )
    def steepest(spectrum: SampleSpectrum, settings: Settings) -> Value:
        return Value(spectrum.lambda_max.number**0.5, spectrum.lambda_max.status)

    assert groups()["mine"] == ("steepest",)
    assert get("steepest").needs == {"lambda_max"}
    spectrum = SampleSpectrum(lambda_max=Value(4.0))
    assert get("steepest").compute(spectrum, Settings()).number == 2.0
    assert steepest(spectrum, Settings()) == Value(2.0)
