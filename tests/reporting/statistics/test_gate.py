"""A limit is broken by what exceeds it, and by what nobody knows."""

from __future__ import annotations

import math
from typing import Any

import pytest

from leakwatch.reporting import Quantity, Row
from leakwatch.reporting.statistics.gate import Limits

NAMES = ["cat", "dog"]


def step(*values: float, quantity: str = "i2f_psnr") -> list[Row]:
    """NaN stands for a value that failed."""
    return [
        Row(2, 8, 10 + i, i % 2, quantity, v, "failed: x" if math.isnan(v) else "ok")
        for i, v in enumerate(values)
    ]


def broken(limits: Limits, rows: list[Row]) -> str:
    return " | ".join(limits.broken(rows, None, NAMES))


def test_samples_above() -> None:
    assert broken(Limits(30.5), step(20.0, 30.0)) == ""
    assert broken(Limits(25), step(20.0, 30.0)) == (
        "after epoch 2: 1 of 2 samples is above 25 dB, the worst sample 11 (dog) at "
        "30.0 dB"
    )
    assert broken(Limits(25, 0.5), step(20.0, 30.0)) == ""
    assert broken(Limits(25, 0.4), step(20.0, 30.0)).endswith("dB; 40% may be")


def test_unknown_is_not_safe() -> None:
    rows = step(20.0, math.nan)
    said = "after epoch 2: 1 of 2 samples is without a number (1 failed)"
    assert broken(Limits(25), rows) == said
    assert broken(Limits(25, unknown_passes=True), rows) == ""
    for limits in (Limits(25), Limits(max_class_psnr=25), Limits(at_most={"x": 1})):
        assert broken(limits, [])
        assert broken(limits, step(1.0, quantity="loss"))
    for limits in (
        Limits(25, unknown_passes=True),
        Limits(max_class_psnr=25, unknown_passes=True),
        Limits(at_most={"x": 1}, unknown_passes=True),
    ):
        assert broken(limits, []) == broken(limits, step(1.0, quantity="loss")) == ""


def test_what_an_attack_achieved_counts_only_upwards() -> None:
    def attacked(sample: int, psnr: float, verdict: float) -> list[Row]:
        status = "not converged: x" if math.isnan(verdict) else "ok"
        return [
            Row(2, 8, sample, 0, "audit/near/psnr", psnr, status),
            Row(2, 8, sample, 0, "audit/near/verdict", verdict, status),
        ]

    assert "at 40.0 dB" in broken(Limits(25), [*step(20.0), *attacked(10, 40.0, 1.0)])
    # One that failed says nothing, and neither does one where nothing was predicted.
    assert broken(Limits(25), [*step(20.0), *attacked(10, 40.0, math.nan)]) == ""
    assert "without a number" in broken(
        Limits(25), [*step(math.nan), *attacked(10, 9.0, 0.0)]
    )
    assert "at 40.0 dB" in broken(
        Limits(25, unknown_passes=True), [*step(math.nan), *attacked(10, 40.0, 1.0)]
    )


def test_classes() -> None:
    limits = Limits(max_class_psnr=25)
    assert broken(limits, step(20.0, 30.0, 24.0)) == (
        "after epoch 2: the mean of dog is 30.0 dB, above 25"
    )
    assert broken(limits, step(20.0, math.nan)) == (
        "after epoch 2: the mean of dog is not known: 1 of 1 sample is without a "
        "number (1 failed)"
    )


def test_a_class_with_an_unknown_sample_is_unknown() -> None:
    # Labels 0, 1, 0, 1: one cat is known and holds the limit, the other is not known.
    rows = step(20.0, 21.0, math.nan, 22.0)
    assert broken(Limits(max_class_psnr=25), rows) == (
        "after epoch 2: the mean of cat is not known: 1 of 2 samples is without a "
        "number (1 failed)"
    )
    assert broken(Limits(max_class_psnr=25, unknown_passes=True), rows) == ""
    # What is known is enough to break it, told otherwise or not.
    for passes in (True, False):
        limits = Limits(max_class_psnr=19.5, unknown_passes=passes)
        assert "the mean of cat is 20.0 dB, above 19.5" in broken(limits, rows)
    both = [
        Row(2, 8, i, 0, "i2f_psnr", value)
        for i, value in ((1, -math.inf), (2, math.inf))
    ]
    assert "cat is not known: infinities" in broken(Limits(max_class_psnr=25), both)


@pytest.mark.parametrize(
    ("key", "limit", "rises"),
    [
        ("leakwatch/psnr/worst", 25.0, True),
        ("leakwatch/psnr/median", 20.7, True),
        ("leakwatch/psnr/share_above_20", 0.6, True),
        ("leakwatch/psnr/class_gap", 5.0, True),
        ("leakwatch-class/cat/i2f_psnr", 25.0, True),
        ("leakwatch-detail/loss/median", 20.7, True),
        ("leakwatch-detail/loss/p05", 2.0, False),
    ],
)
def test_a_key_over_unknown_samples_holds_no_limit(
    key: str, limit: float, rises: bool
) -> None:
    def held(last: float, unknown_passes: bool = False) -> str:
        rows = [
            *step(20.0, 21.0, last),
            *step(20.0, 21.0, last, quantity="loss"),
            # Of no sample known: nothing stands in for it, and it for nothing.
            *step(math.nan, math.nan, math.nan, quantity="i2f_bayes_psnr"),
        ]
        bounds = {key: limit}
        limits = Limits(
            at_most=bounds if rises else {},
            at_least={} if rises else bounds,
            unknown_passes=unknown_passes,
        )
        return broken(limits, rows)

    assert held(19.0) == held(math.nan, unknown_passes=True) == ""
    word = "above" if rises else "below"
    said = f"and may be {word} {limit:g}: samples are without a number"
    assert said in held(math.nan)


def test_a_median_holds_whatever_the_unknown_sample_is() -> None:
    rows = step(20.0, 21.0, math.nan)
    assert broken(Limits(at_most={"leakwatch/psnr/median": 21.0}), rows) == ""


def test_keys_that_unknown_samples_do_not_change() -> None:
    rows = [*step(20.0, math.nan), Row(2, 8, None, None, "seconds", 3.0)]
    keys = {"leakwatch/samples/unknown": 1.0, "leakwatch/seconds": 3.0}
    assert broken(Limits(at_most=keys), rows) == ""


def test_any_key() -> None:
    rows = [*step(20.0), *step(3.0, quantity="i2f")]
    quantities = {"i2f": Quantity("i2f", direction="higher = less exposed")}
    for limits, said in (
        (Limits(at_most={"leakwatch/psnr/worst": 20.0}), []),
        (
            Limits(at_most={"leakwatch/psnr/worst": 19.0}),
            ["after epoch 2: leakwatch/psnr/worst is 20.0, above 19"],
        ),
        (Limits(at_least={"leakwatch-detail/i2f/worst": 3.0}), []),
        (
            Limits(at_least={"leakwatch-detail/i2f/worst": 3.5}),
            ["after epoch 2: leakwatch-detail/i2f/worst is 3.00, below 3.5"],
        ),
        (
            Limits(at_most={"leakwatch/psnr/wurst": 1.0}),
            [
                "after epoch 2: leakwatch/psnr/wurst has no number; did you mean "
                "'leakwatch/psnr/worst'?"
            ],
        ),
    ):
        assert limits.broken(rows, quantities) == said


def test_nothing_to_hold() -> None:
    assert not Limits().any
    assert Limits(0.0).any
    assert Limits(at_least={"x": 1.0}).any


def test_the_latest_step_counts() -> None:
    before = [Row(1, 4, 10, 0, "i2f_psnr", 90.0)]
    assert broken(Limits(25), [*step(20.0), *before]) == ""


@pytest.mark.parametrize("value", [math.inf, 25.000001])
def test_infinite_is_above(value: float) -> None:
    assert "is above 25 dB" in broken(Limits(25), step(value))


@pytest.mark.parametrize(
    ("status", "broken"),
    [
        ("ok", False),
        ("estimated: within 3 %, from 64 of 784 components of the prior", False),
        ("estimated: exposure is at least that and at most 24.9 dB: …", False),
        ("estimated: exposure is at least that and at most 31.0 dB: …", True),
        ("estimated: exposure is at least that: …", True),
    ],
)
def test_a_bound_below_the_limit_does_not_hold_it(status: str, broken: bool) -> None:
    row = Row(1, 9, 7, 0, "i2f_range_psnr", 20.0, status)
    found = Limits(max_psnr=25).broken([row])
    assert bool(found) == broken
    assert not broken or "may be above 25 dB: only a lower bound is known" in found[0]
    assert Limits(max_psnr=25, unknown_passes=True).broken([row]) == []


@pytest.mark.parametrize(
    ("most", "broken"), [(" and at most 28.0 dB", False), (" and at most 40 dB", True)]
)
def test_means_and_keys_of_bounds_hold_no_limit(most: str, broken: bool) -> None:
    status = f"estimated: exposure is at least that{most}: …"
    rows = [
        Row(1, 9, 7, 0, "i2f_range_psnr", 20.0, status),
        Row(1, 9, 8, 0, "i2f_range_psnr", 22.0),
    ]
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"max_class_psnr": 25.0},
            "the mean of cat may be above 25 dB: only a lower bound, 21.0 dB, is known",
        ),
        (
            {"at_most": {"leakwatch/psnr/median": 25.0}},
            "leakwatch/psnr/median is 21.0, and may be above 25: only a bound is known",
        ),
        (
            {"at_most": {"leakwatch-class/cat/i2f_range_psnr": 25.0}},
            "leakwatch-class/cat/i2f_range_psnr is 21.0, and may be above 25: only a",
        ),
    ]
    for how, said in cases:
        found = Limits(**how).broken(rows, None, NAMES)
        assert bool(found) == broken
        assert not broken or said in found[0]
        assert Limits(**how, unknown_passes=True).broken(rows, None, NAMES) == []
    error = Row(1, 9, 7, 0, "i2f", 3.0, "estimated: exposure is at least that: …")
    about = {"i2f": Quantity("i2f", direction="higher = less exposed")}
    limits = Limits(at_least={"leakwatch-detail/i2f/worst": 2.0})
    assert "may be below 2" in limits.broken([error], about)[0]
    assert Limits(at_most={"leakwatch/samples/bounds": 1.0}).broken(rows) == []


def test_attacks_count_where_nothing_was_predicted() -> None:
    rows = [
        Row(2, 8, sample, 0, f"audit/near/{name}", value)
        for sample, psnr in ((10, 40.0), (11, 20.0))
        for name, value in (("psnr", psnr), ("verdict", 1.0))
    ]
    assert "1 of 2 samples is above 25 dB, the worst sample 10" in broken(
        Limits(25, unknown_passes=True), rows
    )
    assert broken(Limits(41, unknown_passes=True), rows) == ""
    assert "no predicted PSNR" in broken(Limits(41), rows)
