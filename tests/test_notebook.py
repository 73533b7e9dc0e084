"""Results in notebooks: short forms, tables, data frames, figures."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import leakwatch
from leakwatch.reporting import RiskLedger, Row
from leakwatch.scores import ScoreResult
from leakwatch.status import OK, Status

pandas = pytest.importorskip("pandas")
pytest.importorskip("plotly")

LOST = Status("failed", "no <memory>")


def scores() -> ScoreResult:
    values = torch.tensor([20.0, 31.5, 25.0], dtype=torch.float64)
    return ScoreResult(
        numbers={"i2f_psnr": values, "loss": values / 10},
        status={"i2f_psnr": (OK, LOST, OK), "loss": (OK, OK, OK)},
        solver="exact",
    )


def test_scores_are_rows_of_samples() -> None:
    found = scores()
    assert repr(found) == "ScoreResult(3 samples: i2f_psnr, loss)"
    frame = found.to_dataframe()
    assert list(frame.columns) == ["sample", "i2f_psnr", "loss", "status"]
    assert frame["i2f_psnr"].tolist()[::2] == [20.0, 25.0]
    assert math.isnan(frame["i2f_psnr"][1])  # what can't be read is no number
    assert frame["status"].tolist() == ["ok", "i2f_psnr: failed: no <memory>", "ok"]
    shown = found._repr_html_()
    assert "<td>not known</td>" in shown
    assert "no &lt;memory&gt;" in shown
    assert "31.5" not in shown
    figure = found.plot()
    assert list(figure.data[0].y) == [25.0, 20.0]
    assert "1 not known" in figure.layout.title.text
    with pytest.raises(KeyError, match="did you mean 'loss'"):
        found.plot("los")


def test_reconstructions_have_pictures() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    x = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    found = leakwatch.attack(net, x, torch.tensor([0, 1]), "dlg", steps=2, restarts=1)
    assert repr(found).startswith("Reconstruction(dlg, normal start: ")
    frame = found.to_dataframe()
    assert frame["target"].tolist() == [0, 1]
    assert frame["loss"].tolist() == found.loss.tolist()
    figure = found.plot(x)
    assert len(figure.data) == 4
    assert figure.data[0].z[0][0][0] == round(
        255 * float((x[0, 0, 0, 0] - x.min()) / (x.max() - x.min()))
    )
    with pytest.raises(ValueError, match="expected that of the images"):
        found.plot(x[:1])


def test_a_ledger_shows_its_last_step(tmp_path: Path) -> None:
    ledger = RiskLedger(tmp_path, run="demo")
    assert ledger._repr_html_().endswith("0 parts)</p>")
    assert ledger.plot() is None
    for epoch, value in ((0, 20.0), (1, 22.5)):
        ledger.append([Row(epoch, epoch, 7, 0, "i2f_psnr", value)])
    assert repr(ledger) == f"RiskLedger({str(tmp_path)!r}, run demo: 2 parts)"
    assert "22.5" in ledger._repr_html_()
    assert "<td>20</td>" not in ledger._repr_html_()
    assert len(ledger.to_dataframe()) == 2
    drawn = [list(trace.y) for trace in ledger.plot().data]
    assert [y for y in drawn if y != [None]][-1] == [20.0, 22.5]


def test_studies_are_rows_too() -> None:
    from studies.initializations.test_conclusions import comparison
    from studies.trade_offs.test_table import cell

    from leakwatch.studies import TradeOff

    compared = comparison({"normal": 41.0, "xavier": 11.8}, {})
    assert repr(compared) == (
        "InitializationComparison(normal, xavier: 2 seeds, 8 samples)"
    )
    assert compared.to_dataframe()["scheme"].tolist() == ["normal", "xavier"]
    assert compared.plot().data
    traded = TradeOff((cell("gaussian", [20.0]),), ("naive",), "relative")
    assert repr(traded) == "TradeOff(gaussian: 1 training, attackers naive)"
    assert traded.to_dataframe()["naive_psnr"].tolist() == [20.0]
    assert "gaussian" in traded._repr_html_()
    assert traded.plot().data
