from __future__ import annotations

import math

import pytest

from leakwatch.reporting import Row, classes_over_epochs

pytest.importorskip("plotly")


def rows(epoch: int, *values: float) -> list[Row]:
    return [
        Row(
            epoch,
            epoch,
            i,
            i % 2,
            "i2f_psnr",
            v,
            "failed: x" if math.isnan(v) else "ok",
        )
        for i, v in enumerate(values)
    ]


def test_cells_are_means_of_classes_and_gaps_are_not_known() -> None:
    figure = classes_over_epochs(
        [*rows(0, 10.0, 20.0, 30.0), *rows(1, 12.0, math.nan, 14.0)], ["cat", "<dog>"]
    )
    assert figure is not None
    (heat,) = figure.data
    assert [list(line) for line in heat.z] == [[20.0, 13.0], [20.0, None]]
    assert list(heat.y) == ["cat", "&lt;dog&gt;"]
    assert list(heat.x) == ["before training", "after epoch 1"]
    assert (heat.zmin, heat.zmax) == (10.0, 40.0)


def test_one_class_or_one_probe_is_no_map() -> None:
    assert classes_over_epochs(rows(0, 10.0, 20.0)) is None
    assert classes_over_epochs([*rows(0, 10.0), *rows(1, 11.0)]) is None
    assert classes_over_epochs([Row(0, 0, 0, 0, "loss", 1.0)]) is None
