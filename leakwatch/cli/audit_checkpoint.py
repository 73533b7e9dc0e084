"""A finished checkpoint scored or attacked once, with ledger, report and table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal, NoReturn

from leakwatch.callbacks._probing.run import ProbeRun
from leakwatch.callbacks._recording.bars import Lines, Terminal
from leakwatch.callbacks._recording.recorder import Recorder
from leakwatch.cli.checkpoint import free_directory, load_weights, read_checkpoint
from leakwatch.cli.record import Record
from leakwatch.cli.subject import AttackCLI, SubjectCLI, draw, loss_factors
from leakwatch.cli.tables import score_table
from leakwatch.cli.training import quiet
from leakwatch.progress import heard_by
from leakwatch.reporting import write_report


def audit_checkpoint(
    options: argparse.Namespace,
    rest: list[str],
    command: Literal["audit", "attack"],
    record: Record | None = None,
) -> None:
    """Score or attack a checkpoint as the callback in its config would have.

    Args:
        options: Options of ``leakwatch audit`` or ``leakwatch attack``; without a
            checkpoint the network is taken as it is initialised.
        rest: Options of LightningCLI: config and what overrides it.
        command: Which.
        record: The run to repeat, if there is one.

    Raises:
        argparse.ArgumentError: ``rest`` or a config can't be understood.
        ValueError: The checkpoint does not fit the config's model, or the samples
            can't be probed.
    """
    checkpoint = None
    if options.ckpt is not None:
        checkpoint = read_checkpoint(options.ckpt, trust=options.trust)
        if record is not None:
            record.check(str(options.ckpt.absolute()), checkpoint.sha256)
    kind = AttackCLI if command == "attack" else SubjectCLI
    split: Literal["train", "val"] = options.split or "train"
    with quiet(), ExitStack() as stack:
        config = [] if record is None else stack.enter_context(record.config())
        cli = kind.read(command, config + rest)
        subject = cli.subject(None if record is None else record.name)
        if checkpoint is not None:
            load_weights(subject.module, checkpoint)
        subject.move_to(options.device)
        recorded = record.probes_of(split) if record is not None else None
        drawn = draw(subject, checkpoint, split, options.probes, recorded)
        probes, prepare, notes = drawn
        subject.monitor.subject = cli.described(
            command,
            split=split,
            probes=options.probes,
            device=options.device,
            checkpoint=None
            if checkpoint is None
            else {
                "path": str(checkpoint.path.absolute()),
                "sha256": checkpoint.sha256,
            },
        )
        for sentence in filter(None, (subject.note, *notes)):
            print(sentence)
        epoch, step = (
            (0, 0) if checkpoint is None else (checkpoint.epoch, checkpoint.step)
        )
        # All as the callback has it during training, but for the Trainer.
        run = ProbeRun(subject.monitor, subject.module, probes, _say, prepare)
        factors = None if record is None else record.loss_factors
        run.weigh(loss_factors(subject, checkpoint, factors))
        with _progress(command):
            share = run.measure(epoch, step)
    if share.error and not any(row.usable for row in share.rows):
        raise RuntimeError(f"the samples can't be scored: {share.error}")
    name = "initial weights" if checkpoint is None else checkpoint.path.name
    stem = name if checkpoint is None else checkpoint.path.stem
    directory = free_directory(options.output, checkpoint, command)
    recorder = Recorder(
        directory,
        f"{stem}, {split} samples",
        None,
        probes,
        run.metadata(defended=subject.defended, checkpoint=name, split=split),
        subject.monitor.name,
        _refuse,
    )
    run.record(recorder, [share], run.rows([share], epoch, step))
    print(
        f"\n{name}: {len(probes)} samples of the {split} split "
        f"in {share.seconds:.1f} s\n\n{score_table(directory)}\n"
    )
    if record is not None:
        print(f"{record.compare(directory)}\n")
    try:
        print(f"report: {write_report(directory)}")
    except ModuleNotFoundError as error:
        print(f"recorded in: {directory}; no report: {error}")
    if share.error:
        raise RuntimeError(
            f"a part of it failed and is recorded without numbers: {share.error}"
        )


@contextmanager
def _progress(command: str) -> Iterator[None]:
    """A bar at a terminal, lines elsewhere."""
    title = f"leakwatch {command}"
    if not sys.stderr.isatty():
        with heard_by(Lines(print, title)):
            yield
        return
    bar = Terminal(title)
    try:
        with heard_by(bar):
            yield
    finally:
        bar.close()


def _say(key: str, text: str) -> None:
    print(text)


def _refuse(key: str, text: str) -> NoReturn:
    """A run goes on without a record; this command is about nothing else."""
    raise RuntimeError(text)
