"""Tables of correlations in the shape of LAVP's."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from leakwatch.reporting.statistics.correlation import resampled_spearman, spearman
from leakwatch.reporting.statistics.correlation_table import (
    CorrelationTable,
    Measurement,
    correlation_table,
)


def measurement(setting: str, architecture: str, seed: int, n: int = 40) -> Measurement:
    rng = np.random.default_rng(seed)
    mse = rng.normal(size=n)
    return Measurement(
        setting,
        architecture,
        {"i2f": mse + rng.normal(size=n), "grad_norm": rng.normal(size=n)},
        {"mse": mse, "psnr": -mse},
    )


@pytest.fixture
def table() -> CorrelationTable:
    return correlation_table(
        [
            measurement("MNIST + L2", "lenet", 0),
            measurement("MNIST + L2", "resnet8", 1),
            measurement("MNIST + cosine", "lenet", 2),
        ],
        bootstrap=200,
    )


def test_cells_are_correlations_of_their_columns(table: CorrelationTable) -> None:
    source = measurement("MNIST + L2", "resnet8", 1)
    for score in ("i2f", "grad_norm"):
        for metric in ("mse", "psnr"):
            expected = spearman(
                source.scores[score], source.metrics[metric], bootstrap=200
            )
            assert table.cells["MNIST + L2", "resnet8", score, metric] == expected


def test_averages_are_means_over_architectures(table: CorrelationTable) -> None:
    sources = [measurement("MNIST + L2", "x", seed) for seed in (0, 1)]
    rho = [
        stats.spearmanr(m.scores["i2f"], m.metrics["mse"]).statistic for m in sources
    ]
    average = table.averages["MNIST + L2", "i2f", "mse"]
    assert average.rho == pytest.approx(np.mean(rho), rel=1e-12)
    assert (average.architectures, average.n) == (2, 80)
    draws = np.mean(
        [
            resampled_spearman(m.scores["i2f"], m.metrics["mse"], resamples=200)
            for m in sources
        ],
        axis=0,
    )
    assert average.low == pytest.approx(np.quantile(draws, 0.025))
    assert average.high == pytest.approx(np.quantile(draws, 0.975))
    z = sum(rho) / math.sqrt(2 / 39)
    assert average.p_value == pytest.approx(2 * stats.norm.sf(z), rel=1e-9)
    assert average.clear


def test_one_architecture_is_its_own_average(table: CorrelationTable) -> None:
    average = table.averages["MNIST + cosine", "i2f", "mse"]
    cell = table.cells["MNIST + cosine", "lenet", "i2f", "mse"]
    assert average.n == cell.n
    for name in ("rho", "low", "high"):
        expected = pytest.approx(getattr(cell, name), rel=1e-12)
        assert getattr(average, name) == expected


def test_undefined_architectures_are_left_out_and_named() -> None:
    flat = Measurement(
        "S", "flat", {"i2f": [1.0] * 40, "dead": [1.0] * 40}, {"mse": range(40)}
    )
    good = Measurement(
        "S", "good", {"i2f": range(40), "dead": [0.0] * 40}, {"mse": range(40)}
    )
    table = correlation_table([flat, good], bootstrap=50)
    mixed = table.averages["S", "i2f", "mse"]
    assert (mixed.rho, mixed.architectures) == (1.0, 1)
    assert str(mixed.status) == "estimated: undefined in 1 of 2 architectures"
    dead = table.averages["S", "dead", "mse"]
    assert dead.status.word == "undefined"
    assert "first column is constant" in dead.status.reason
    assert math.isnan(dead.rho)
    assert "| +1.00* | u |" in table.to_markdown()


def test_markdown_has_a_row_per_setting_and_a_column_per_score(
    table: CorrelationTable,
) -> None:
    lines = table.to_markdown().splitlines()
    assert lines[0] == "| ρ (mse / psnr) | i2f | grad_norm |"
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| MNIST + L2",
        "| MNIST + cosine",
    ]
    cell = table.averages["MNIST + L2", "i2f", "mse"]
    assert f"| {cell.rho:+.2f}* / {-cell.rho:+.2f}* |" in lines[2]
    single = table.to_markdown("resnet8").splitlines()
    assert single[3] == "| MNIST + cosine | – / – | – / – |"
    with pytest.raises(ValueError, match="holds lenet, resnet8"):
        table.to_markdown("vgg")


def test_rows_hold_every_cell_and_average(table: CorrelationTable) -> None:
    rows = table.rows()
    assert len(rows) == 3 * 4 + 2 * 4
    average = next(r for r in rows if r["architecture"] == "average")
    assert set(average) == {
        "setting",
        "architecture",
        "score",
        "metric",
        "rho",
        "n",
        "p_value",
        "low",
        "high",
        "status",
    }


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="same samples"):
        Measurement("S", "a", {"i2f": [1, 2]}, {"mse": [1, 2, 3]})
    with pytest.raises(ValueError, match="needs scores and metrics"):
        Measurement("S", "a", {}, {"mse": [1, 2, 3]})
    with pytest.raises(ValueError, match="two measurements"):
        correlation_table([measurement("S", "a", 0), measurement("S", "a", 1)])
    with pytest.raises(ValueError, match="at least one"):
        correlation_table([])
