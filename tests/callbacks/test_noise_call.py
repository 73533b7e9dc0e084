"""The call that a report names gives the noise that its own prediction asks for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from monitor_cases import Tiny, dataset, fit, monitor, rows_of
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import leakwatch
from leakwatch.priors import measured_prior, natural_prior
from leakwatch.reporting import LedgerTable, RiskLedger
from leakwatch.reporting.html.conclusions import conclude
from leakwatch.reporting.noise_call import _PRIORS
from leakwatch.reporting.run_facts import RunFacts
from leakwatch.reporting.statistics.headline import find_headline

MEAN, STD = 0.4, 0.3


def pixels() -> Tensor:
    """Images of one grey, nearly: their statistics tell an attacker much."""
    noise = dataset(64).tensors[0]
    level = torch.rand(64, 1, 1, 1, generator=torch.Generator().manual_seed(1))
    return 0.1 + 0.6 * level + 0.2 * noise


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "prior=leakwatch.priors.measured_prior(images)"),
        ({"mean": MEAN, "std": STD}, "mean=0.4, std=0.3"),
        ({"prior": "natural"}, "prior='natural'"),
        ({"prior": "white"}, "prior_mean=images.mean(0)"),
        ({"prior_std": 0.2}, "prior_std=0.2"),
        ({"data_range": 2.0, "target_psnr": 25.0}, "target_psnr=25, "),
        ({"parameters": ["net.1.*"]}, "parameters=['net.1.*']"),
    ],
    ids=lambda given: ", ".join(given) if isinstance(given, dict) else "",
)
def test_the_named_call_runs_and_agrees(
    tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    images, labels = pixels(), dataset(64).tensors[1]
    x = (images - MEAN) / STD if "mean" in options else images
    watched = monitor(
        scores=["i2f_range_psnr", "noise_std_for_range_psnr"],
        dtype="float64",
        **options,
    )
    net = Tiny()
    data = DataLoader(TensorDataset(x, labels), batch_size=16)
    fit(tmp_path, watched, module=net, data=data)
    assert watched.run_directory is not None
    table = LedgerTable.from_rows(rows_of(watched))
    metadata = RiskLedger.open(watched.run_directory).read_metadata()
    answers = conclude(table, find_headline(table), RunFacts.of(metadata), metadata)
    call = re.search(r"leakwatch\.recommend_noise\(.*\)(?= checks)", answers[-1].answer)
    assert call is not None, answers
    assert named in call[0]
    assert ("data_range=2" in call[0]) == ("data_range" in options)
    last = table.last("noise_std_for_range_psnr")
    assert last is not None
    probes = list(last[1].samples)
    names = {
        "leakwatch": leakwatch,
        "net": net,
        "x": x[probes],
        "y": labels[probes],
        "images": images,
    }
    found = eval(f"{call[0][:-1]}, check=0)", names)
    needed = [probe.needed.number for probe in found.probes]
    expected = sorted(last[1].values, reverse=True)
    torch.testing.assert_close(needed, expected, rtol=0.02, atol=0)


def test_what_hooks_do_to_samples_is_in_it(tmp_path: Path) -> None:
    class Hooked(Tiny):
        def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
            x, y = batch
            return (x - MEAN) / STD, y

    for kind, asked in ((Tiny, False), (Hooked, True)):
        watched = monitor(directory=str(tmp_path / kind.__name__))
        fit(tmp_path, watched, module=kind())
        table = LedgerTable.from_rows(rows_of(watched))
        metadata = RiskLedger.open(str(watched.run_directory)).read_metadata()
        answers = conclude(table, find_headline(table), RunFacts.of(metadata), metadata)
        assert ("prepare=prepare)" in answers[-1].answer) == asked
        assert ("samples of the data set, " in answers[-1].answer) == asked


def test_its_words_are_those_of_priors() -> None:
    own = measured_prior(pixels()).knows, natural_prior((1, 4, 4)).knows
    assert own == tuple(_PRIORS)
