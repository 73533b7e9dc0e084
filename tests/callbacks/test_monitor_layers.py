from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monitor_cases import Tiny, dataset, fit, monitor, rows_of
from torch import nn

from leakwatch import ProbeSet, layer_attribution
from leakwatch.callbacks import LeakageMonitor
from leakwatch.reporting import LAYERS, LedgerTable, layers_over_epochs, write_report


def test_the_share_of_each_layer_is_recorded(tmp_path: Path) -> None:
    probes = ProbeSet.from_dataset(dataset(), per_class=1)
    watched = monitor(probes=probes, layers=True, report=True)
    module = Tiny()
    fit(tmp_path, watched, module=module, max_epochs=1)
    assert watched.run_directory is not None
    table = LedgerTable.from_rows(rows_of(watched))
    names = [n for n in table.quantities if n.startswith(LAYERS)]
    assert names == ["layers/net.1", "layers/net.3"]
    assert len(table.moments) == 2
    found = [table.columns[table.moments[-1], name] for name in names]
    shares = torch.tensor(np.array([column.values for column in found]).T)
    true = layer_attribution(
        module, probes.x, probes.y, input_scale=probes.input_scale()
    )
    torch.testing.assert_close(shares, true.share, rtol=1e-4, atol=0)
    html = (Path(watched.run_directory) / "report.html").read_text("utf-8")
    assert "Which layer leaks" in html
    assert 'id="fig-layers"' in html
    figure = layers_over_epochs(table)
    assert figure is not None
    assert list(figure.data[0].y) == ["net.1", "net.3"]
    # They have a section of their own and no keys, of which there would be many.
    assert not any("layers" in key for key in watched._progress.latest)


def test_without_the_exact_solver_there_are_no_shares(tmp_path: Path) -> None:
    watched = monitor(layers=True, solver="lanczos", scores=["lavp"])
    fit(tmp_path, watched)
    assert watched.run_directory is not None
    rows = [r for r in rows_of(watched) if r.quantity.startswith(LAYERS)]
    assert rows
    assert all(r.status.startswith("not computed: needs") for r in rows)
    html = write_report(watched.run_directory).read_text("utf-8")
    assert "needs solver=&#39;exact&#39;" in html


def test_nothing_about_layers_unless_asked(tmp_path: Path) -> None:
    watched = monitor()
    fit(tmp_path, watched)
    assert watched.run_directory is not None
    assert not any(r.quantity.startswith(LAYERS) for r in rows_of(watched))
    html = write_report(watched.run_directory).read_text("utf-8")
    assert "Which layer leaks" not in html


def test_scores_of_the_parameters_that_are_shared(tmp_path: Path) -> None:
    probes = ProbeSet.from_dataset(dataset(), per_class=1)
    same: dict[str, Any] = {
        "probes": probes,
        "scores": ["norms"],
        "layers": True,
        "solver": "exact",
    }
    whole = monitor(**same)
    head = monitor(**same, parameters="net.3", name="head")
    fit(tmp_path, whole, head)
    first, second = (LedgerTable.from_rows(rows_of(m)) for m in (whole, head))
    assert "layers/net.1" not in second.quantities
    moment = first.moments[-1]
    all_of_it = first.columns[moment, "jacobian_norm"].values
    share = first.columns[moment, "layers/net.3"].values
    of_head = second.columns[moment, "jacobian_norm"].values
    assert of_head == pytest.approx(all_of_it * share**0.5, rel=1e-4)


def test_a_filter_that_matches_nothing_is_refused_before_training(
    tmp_path: Path,
) -> None:
    steps: list[int] = []

    class Counted(Tiny):
        def training_step(self, batch: object, batch_idx: int) -> torch.Tensor:
            steps.append(batch_idx)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match=r"'head' matches none of .*net\.1\.weight"):
        fit(tmp_path, monitor(parameters="head"), module=Counted)
    assert not steps
    with pytest.raises(TypeError, match="must be a name, a list of names"):
        LeakageMonitor(parameters=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="layers"):
        LeakageMonitor(layers="all")  # type: ignore[arg-type]


def test_a_parameter_of_the_network_itself(tmp_path: Path) -> None:
    class Flat(Tiny):
        def __init__(self) -> None:
            super().__init__(nn.Identity())
            self.weight = nn.Parameter(torch.randn(3, 16) / 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1) @ self.weight.T

    watched = monitor(layers=True)
    fit(tmp_path, watched, module=Flat)
    shares = [r.value for r in rows_of(watched) if r.quantity == "layers/(network)"]
    assert shares == [1.0] * len(shares)
    assert shares
