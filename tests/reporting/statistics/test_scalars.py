from __future__ import annotations

import math

import pytest

from leakwatch.reporting import Quantity, Row, log_scalars
from leakwatch.reporting.statistics.scalars import class_tags

QUANTITIES = {
    "i2f": Quantity("i2f", direction="higher = less exposed"),
    "i2f_psnr": Quantity("i2f_psnr", unit="dB", direction="higher = more exposed"),
}


def step(epoch: int, scale: float = 1.0) -> list[Row]:
    return [
        Row(epoch, 4, 1, 0, "i2f", 1.0 * scale),
        Row(epoch, 4, 2, 1, "i2f", 3.0 * scale),
        Row(epoch, 4, 1, 0, "i2f_psnr", 30.0),
        Row(epoch, 4, 2, 1, "i2f_psnr", math.nan, "failed: x"),
        Row(epoch, 4, 1, 0, "loss", 0.5),
        Row(epoch, 4, None, None, "seconds", 1.5),
        Row(epoch, 4, None, None, "time_fraction", math.nan, "not computed: first"),
    ]


def test_keys_and_values_exactly() -> None:
    found = log_scalars(step(2), QUANTITIES, ["cat", "a/b"])
    nan = pytest.approx(math.nan, nan_ok=True)
    assert found == {
        "leakwatch/i2f/median": 2.0,
        "leakwatch/i2f/p05": pytest.approx(1.1),
        "leakwatch/i2f/p95": pytest.approx(2.9),
        "leakwatch/i2f/worst": 1.0,
        "leakwatch/class/cat/i2f": 1.0,
        "leakwatch/class/a_b/i2f": 3.0,
        "leakwatch/i2f/class_ratio": 3.0,
        "leakwatch/i2f/class_gini": 0.25,
        "leakwatch/i2f_psnr/median": 30.0,
        "leakwatch/i2f_psnr/p05": 30.0,
        "leakwatch/i2f_psnr/p95": 30.0,
        "leakwatch/i2f_psnr/worst": 30.0,
        "leakwatch/class/cat/i2f_psnr": 30.0,
        "leakwatch/class/a_b/i2f_psnr": nan,
        "leakwatch/loss/median": 0.5,
        "leakwatch/loss/p05": 0.5,
        "leakwatch/loss/p95": 0.5,
        "leakwatch/class/cat/loss": 0.5,
        "leakwatch/seconds": 1.5,
        "leakwatch/time_fraction": nan,
    }


def test_per_class_keys_can_be_chosen() -> None:
    found = log_scalars(step(0), QUANTITIES, per_class={"i2f"})
    assert [key for key in found if "/class/" in key] == [
        "leakwatch/class/0/i2f",
        "leakwatch/class/1/i2f",
    ]


def test_the_latest_step_counts_and_no_rows_are_no_keys() -> None:
    found = log_scalars([*step(3, 10.0), *step(1)], QUANTITIES)
    assert found["leakwatch/i2f/median"] == 20.0
    assert log_scalars([]) == {}


def test_the_later_row_of_a_sample_stands() -> None:
    found = log_scalars([*step(1), Row(1, 4, 2, 1, "i2f", 5.0)], QUANTITIES)
    assert found["leakwatch/i2f/median"] == 3.0


def test_class_tags_are_distinct_whatever_is_present() -> None:
    names = ["cat", "cat", "", "x/y"]
    assert class_tags([1], names) == {1: "cat-1"}
    assert class_tags([2, 3, 9], names) == {2: "2", 3: "x_y", 9: "9"}
