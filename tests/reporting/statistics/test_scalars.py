from __future__ import annotations

import math
import posixpath
import re

import pytest

from leakwatch.reporting import Quantity, Row, log_scalars
from leakwatch.reporting.statistics.scalars import class_tags, extreme_of

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
        "leakwatch/psnr/median": 30.0,
        "leakwatch/psnr/worst": 30.0,
        "leakwatch/psnr/share_above_20": 1.0,
        "leakwatch/psnr/class_gap": nan,
        "leakwatch/samples/known": 1.0,
        "leakwatch/samples/unknown": 1.0,
        "leakwatch/samples/bounds": 0.0,
        "leakwatch/seconds": 1.5,
        "leakwatch/time_fraction": nan,
        "leakwatch-detail/i2f/median": 2.0,
        "leakwatch-detail/i2f/p05": pytest.approx(1.1),
        "leakwatch-detail/i2f/p95": pytest.approx(2.9),
        "leakwatch-detail/i2f/worst": 1.0,
        "leakwatch-class/cat/i2f": 1.0,
        "leakwatch-class/a_b/i2f": 3.0,
        "leakwatch-detail/i2f/class_ratio": 3.0,
        "leakwatch-detail/i2f/class_gini": 0.25,
        "leakwatch-detail/i2f_psnr/median": 30.0,
        "leakwatch-detail/i2f_psnr/p05": 30.0,
        "leakwatch-detail/i2f_psnr/p95": 30.0,
        "leakwatch-detail/i2f_psnr/worst": 30.0,
        "leakwatch-class/cat/i2f_psnr": 30.0,
        "leakwatch-class/a_b/i2f_psnr": nan,
        "leakwatch-detail/loss/median": 0.5,
        "leakwatch-detail/loss/p05": 0.5,
        "leakwatch-detail/loss/p95": 0.5,
        "leakwatch-class/cat/loss": 0.5,
    }


def test_the_overview_counts_what_is_known() -> None:
    values = [(10.0, "ok"), (20.0, "estimated: x"), (26.0, "ok"), (40.0, "failed: x")]
    rows = [
        Row(1, 4, i, i % 2, "i2f_psnr", value, status)
        for i, (value, status) in enumerate(values)
    ]
    rows += [
        Row(1, 4, 0, 0, "lavp_l2_max", 3.0),
        Row(1, 4, 0, 0, "audit/near/psnr", 30.0),
        Row(1, 4, None, None, "audit/near/recovered", 0.5),
        Row(1, 4, None, None, "audit/spearman/i2f/near/psnr", 0.9),
    ]
    found = log_scalars(rows, QUANTITIES, prefix="watch")
    assert {k: v for k, v in found.items() if k.startswith("watch/")} == {
        "watch/psnr/median": 20.0,
        "watch/psnr/worst": 26.0,
        "watch/psnr/share_above_20": pytest.approx(1 / 3),
        "watch/psnr/class_gap": pytest.approx(2.0),  # means of 18 and 20 dB
        "watch/samples/known": 3.0,
        "watch/samples/unknown": 1.0,
        "watch/samples/bounds": 0.0,
        "watch/lavp_l2_max/median": 3.0,
        "watch/audit/near/psnr/median": 30.0,
        "watch/audit/near/psnr/worst": 30.0,
        "watch/audit/near/recovered": 0.5,
    }
    assert found["watch-detail/audit/spearman/i2f/near/psnr"] == 0.9


def test_the_worst_of_a_history() -> None:
    for key, expected in {
        "watch/psnr/worst": "max",
        "watch/psnr/median": "",
        "watch-detail/i2f/worst": "min",
        "watch-detail/i2f_psnr/worst": "max",
        "watch/audit/near/psnr/worst": "max",
        "watch-class/worst/i2f": "",
    }.items():
        assert extreme_of(key, QUANTITIES, "watch") == expected


def test_per_class_keys_can_be_chosen() -> None:
    found = log_scalars(step(0), QUANTITIES, per_class={"i2f"})
    assert [key for key in found if "-class/" in key] == [
        "leakwatch-class/0/i2f",
        "leakwatch-class/1/i2f",
    ]


def test_the_latest_step_counts_and_no_rows_are_no_keys() -> None:
    found = log_scalars([*step(3, 10.0), *step(1)], QUANTITIES)
    assert found["leakwatch-detail/i2f/median"] == 20.0
    assert log_scalars([]) == {}


def test_the_later_row_of_a_sample_stands() -> None:
    found = log_scalars([*step(1), Row(1, 4, 2, 1, "i2f", 5.0)], QUANTITIES)
    assert found["leakwatch-detail/i2f/median"] == 3.0


def test_class_tags_are_distinct_whatever_is_present() -> None:
    names = ["cat", "cat", "", "x/y"]
    assert class_tags([1], names) == {1: "cat-1"}
    assert class_tags([2, 3, 9], names) == {2: "2", 3: "x_y", 9: "9"}


def test_class_names_make_keys_that_every_logger_takes() -> None:
    names = ["Größe", "été", "猫", "犬", "T-shirt/top", "a (b)", "..", " x ", "a_b"]
    tags = class_tags(range(len(names)), names)
    assert len(set(tags.values())) == len(names)
    for tag in tags.values():
        # What MLflow takes, and a path that is its own shortest form.
        assert re.fullmatch(r"[A-Za-z0-9_. -]+", tag)
        assert posixpath.normpath(tag) == tag
