"""Probing with two processes (DDP, gloo, one thread each) against one: CPU seconds.

    LEAKWATCH_TEST_DATA=... python benchmarks/ddp.py [--probes 8]

A LeNet on real digits, ``LeakageMonitor(precision="exact")``; the later one of two
probe steps is timed, in each process for itself: other work on the machine hardly
counts. The records of both runs are compared, value by value.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from monitor import Network, Timed
from networks import pixels
from torch.utils.data import DataLoader, TensorDataset

from leakwatch.models import LeNet, initialize
from leakwatch.reporting import RiskLedger


def watched(folder: Path, processes: int, probes: int) -> None:
    """One training; each process leaves its seconds in the folder."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    x, y = pixels("MNIST", train=True, size=28)
    # The same batches on all processes, so that both runs train the same network.
    data = DataLoader(TensorDataset(x[:64], y[:64]), 32)
    net = initialize(LeNet(), "uniform", seed=0)
    monitor = Timed(probes, precision="exact", noise_std=1e-2, verbose=False)
    arguments: dict[str, Any] = {}
    if processes > 1:
        arguments = {"strategy": "ddp", "devices": processes}
        arguments["use_distributed_sampler"] = False
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[monitor],
        **arguments,
    )
    trainer.fit(Network(net), data)
    found = {"seconds": monitor.steps[-1], "directory": str(monitor.run_directory)}
    (folder / f"{trainer.global_rank}.json").write_text(json.dumps(found))


def main() -> None:
    """Runs both and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--probes", type=int, default=8)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        watched(Path(args.run[0]), int(args.run[1]), args.probes)
        return
    seconds, rows = [], []
    for processes in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--probes", str(args.probes)]
            command += ["--run", folder, str(processes)]
            one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
            subprocess.run(command, check=True, env=one_thread)
            files = sorted(Path(folder).glob("?.json"))
            found = [json.loads(path.read_text()) for path in files]
            seconds.append([one["seconds"] for one in found])
            ledger = RiskLedger(Path(found[0]["directory"]))
            rows.append(
                {
                    (r.epoch, r.sample, r.quantity): (r.value, r.status)
                    for r in ledger.rows()
                    if r.sample is not None
                }
            )
    longest = [max(s) for s in seconds]
    print(f"later probe step of {args.probes}, CPU s of each process: {seconds}")
    print(f"two processes are {longest[0] / longest[1]:.2f} times faster")
    one, two = rows
    apart = [
        abs(two[key][0] - value) / max(abs(value), 1e-300)
        for key, (value, _) in one.items()
        if math.isfinite(value)
    ]
    same = one.keys() == two.keys() and all(one[k][1] == two[k][1] for k in one)
    print(
        f"{len(one)} values; rows and statuses are {'' if same else 'not '}the same; "
        f"numbers differ by at most {max(apart):.1e} of themselves"
    )


if __name__ == "__main__":
    main()
