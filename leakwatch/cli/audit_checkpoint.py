"""A finished checkpoint scored or attacked once, with ledger, report and table."""

from __future__ import annotations

import argparse
from typing import Literal, NoReturn

from leakwatch.callbacks._probing.run import ProbeRun
from leakwatch.callbacks._recording.recorder import Recorder
from leakwatch.cli.checkpoint import free_directory, load_weights, read_checkpoint
from leakwatch.cli.subject import AttackCLI, SubjectCLI, draw
from leakwatch.cli.tables import score_table
from leakwatch.cli.training import quiet
from leakwatch.reporting import write_report


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
        subject.move_to(options.device)
        epoch, step = (
            (0, 0) if checkpoint is None else (checkpoint.epoch, checkpoint.step)
        )
        # All as the callback has it during training, but for the Trainer.
        run = ProbeRun(subject.monitor, subject.module, probes, warn=_say)
        share = run.measure(epoch, step)
    if share.error and not any(row.usable for row in share.rows):
        raise RuntimeError(f"the samples can't be scored: {share.error}")
    name = "initial weights" if checkpoint is None else checkpoint.path.name
    stem = name if checkpoint is None else checkpoint.path.stem
    directory = free_directory(options.output, checkpoint, command)
    recorder = Recorder(
        directory,
        f"{stem}, {options.split} samples",
        None,
        probes,
        run.metadata(defended=subject.defended, checkpoint=name, split=options.split),
        subject.monitor.name,
        _refuse,
    )
    run.record(recorder, [share], run.rows([share], epoch, step))
    print(
        f"\n{name}: {len(probes)} samples of the {options.split} split "
        f"in {share.seconds:.1f} s\n\n{score_table(directory)}\n"
    )
    try:
        print(f"report: {write_report(directory)}")
    except ModuleNotFoundError as error:
        print(f"recorded in: {directory}; no report: {error}")
    if share.error:
        raise RuntimeError(
            f"a part of it failed and is recorded without numbers: {share.error}"
        )


def _say(key: str, text: str) -> None:
    print(text)


def _refuse(key: str, text: str) -> NoReturn:
    """A run goes on without a record; this command is about nothing else."""
    raise RuntimeError(text)
