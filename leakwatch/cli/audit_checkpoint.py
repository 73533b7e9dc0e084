"""The scores of a finished checkpoint, once, with ledger, report and table."""

from __future__ import annotations

import argparse
from typing import Literal

import torch

from leakwatch.callbacks._probing.observing import observing
from leakwatch.callbacks._probing.step import (
    Share,
    merge_pictures,
    merge_rows,
    merge_spectra,
)
from leakwatch.callbacks._recording.pictures import pictures
from leakwatch.callbacks._recording.run_metadata import assumed, describe_run
from leakwatch.cli.checkpoint import free_directory, load_weights, read_checkpoint
from leakwatch.cli.subject import AttackCLI, Subject, SubjectCLI, choose_device, draw
from leakwatch.cli.tables import score_table
from leakwatch.cli.training import quiet
from leakwatch.derivatives import GradientMap
from leakwatch.probes import ProbeSet
from leakwatch.reporting import RiskLedger, Row, write_report
from leakwatch.scores import Settings

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def audit_checkpoint(
    options: argparse.Namespace, rest: list[str], command: Literal["audit", "attack"]
) -> None:
    """Score or attack a checkpoint as the callback in its config would have.

    Args:
        options: Options of ``leakwatch audit`` or ``leakwatch attack``; without a
            checkpoint the network is taken as it is initialised.
        rest: Options of LightningCLI: config and what overrides it.
        command: Which.

    Raises:
        argparse.ArgumentError: ``rest`` or a config can't be understood.
        ValueError: The checkpoint does not fit the config's model, or the samples
            can't be probed.
    """
    checkpoint = None
    if options.ckpt is not None:
        checkpoint = read_checkpoint(options.ckpt, trust=options.trust)
    with quiet():
        kind = AttackCLI if command == "attack" else SubjectCLI
        subject = kind.read(command, rest).subject()
        if checkpoint is not None:
            load_weights(subject.module, checkpoint)
        probes, note = draw(subject, checkpoint, options.split, options.probes)
        for sentence in filter(None, (subject.note, note)):
            print(sentence)
        subject.module.to(choose_device(options.device, subject.accelerator))
        settings = _settings(subject, probes)
        moment = (0, 0) if checkpoint is None else (checkpoint.epoch, checkpoint.step)
        share = _measure(subject, probes, settings, moment)
    name = "initial weights" if checkpoint is None else checkpoint.path.name
    config = {
        **subject.monitor.settled(),
        "checkpoint": name,
        "split": options.split,
    }
    described = describe_run(
        probes,
        subject.monitor.describe(),
        settings,
        config,
        subject.module,
        subject.monitor.message,
    )
    metadata = {
        **described,
        "assumed": assumed(described["config"], defended=subject.defended),
        "solver_used": share.solver,
        "notes": list(share.notes),
    }
    stem = name if checkpoint is None else checkpoint.path.stem
    ledger = RiskLedger(
        free_directory(options.output, checkpoint, command),
        run=f"{stem}, {options.split} samples",
    )
    _record(ledger, metadata, probes, share, subject, moment)
    print(
        f"\n{name}: {len(probes)} samples of the {options.split} split "
        f"in {share.seconds:.1f} s\n\n{score_table(ledger.directory)}\n"
    )
    try:
        print(f"report: {write_report(ledger.directory)}")
    except ModuleNotFoundError as error:
        print(f"recorded in: {ledger.directory}; no report: {error}")
    if share.error:
        raise RuntimeError(
            f"a part of it failed and is recorded without numbers: {share.error}"
        )


def _settings(subject: Subject, probes: ProbeSet) -> Settings:
    monitor = subject.monitor
    return Settings(
        noise_std=monitor.noise_std,
        epsilon=monitor.epsilon,
        prior_std=monitor.prior_std or probes.prior_std,
        data_range=monitor.data_range or probes.data_range,
        target_psnr=monitor.target_psnr,
    )


def _measure(
    subject: Subject, probes: ProbeSet, settings: Settings, moment: tuple[int, int]
) -> Share:
    module, monitor = subject.module, subject.monitor
    # What the monitor's own map is made of during training.
    gradients = GradientMap(
        module,
        monitor.criterion,
        parameters=monitor.parameters,
        dtype=_DTYPES[monitor.dtype],
    )
    monitor.examine(module, gradients, probes)
    with observing(module):
        gradients.check(probes.x.to(module.device), probes.y.to(module.device))
    share = monitor.measure(
        module,
        gradients,
        probes,
        settings,
        epoch=moment[0],
        step=moment[1],
        rank=0,
        world_size=1,
    )
    if share.error and not any(row.usable for row in share.rows):
        raise RuntimeError(f"the samples can't be scored: {share.error}")
    return share


def _record(
    ledger: RiskLedger,
    metadata: dict[str, object],
    probes: ProbeSet,
    share: Share,
    subject: Subject,
    moment: tuple[int, int],
) -> None:
    ledger.write_metadata(metadata)
    shown = pictures(probes)
    if shown is not None:
        ledger.write_probes(shown, probes.index, probes.y.numpy())
    rows = merge_rows([share], probes.index)
    rows += subject.monitor.conclude(rows, *moment)
    seconds = Row(*moment, None, None, "seconds", share.seconds)
    ledger.append(
        [*rows, seconds],
        merge_spectra([share], probes.index, *moment),
        merge_pictures([share], probes.index, *moment),
    )
