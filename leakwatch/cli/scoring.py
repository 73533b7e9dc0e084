"""The scores of a finished checkpoint, once, with ledger, report and table."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from leakwatch.callbacks.observing import observing
from leakwatch.callbacks.pictures import pictures
from leakwatch.callbacks.probing import Share, measure_share, merge_spectra
from leakwatch.callbacks.recording import describe_run
from leakwatch.cli.checkpoint import Checkpoint, load_weights, read_checkpoint
from leakwatch.cli.subject import Subject, SubjectCLI, draw
from leakwatch.cli.tables import score_table
from leakwatch.cli.training import quiet
from leakwatch.gradients import GradientMap
from leakwatch.probes import ProbeSet
from leakwatch.reporting import RiskLedger, Row, write_report
from leakwatch.scores import Settings

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def audit(options: argparse.Namespace, rest: list[str]) -> None:
    """Score a checkpoint as the monitor in its config would have.

    Args:
        options: Options of ``leakwatch audit``.
        rest: Options of LightningCLI: config and what overrides it.

    Raises:
        argparse.ArgumentError: ``rest`` or a config can't be understood.
        ValueError: The checkpoint does not fit the config's model, or the samples
            can't be probed.
    """
    checkpoint = read_checkpoint(options.ckpt, trust=options.trust)
    with quiet():
        cli = SubjectCLI(
            args=rest,
            run=False,
            seed_everything_default=0,
            save_config_callback=None,
            load_from_checkpoint_support=False,
            parser_kwargs={"prog": "leakwatch audit", "exit_on_error": False},
        )
        subject = cli.subject()
        subject.module.configure_model()
        load_weights(subject.module, checkpoint)
        probes, note = draw(subject, checkpoint, options.split, options.probes)
        for sentence in filter(None, (subject.note, note)):
            print(sentence)
        subject.module.to(_device(options.device, subject.accelerator))
        settings = _settings(subject, probes)
        share = _measure(subject, probes, settings, checkpoint)
    config = {
        "checkpoint": checkpoint.path.name,
        "split": options.split,
        "scores": [score.name for score in subject.monitor.scores],
        "solver": subject.monitor.solver,
        "dtype": subject.monitor.dtype,
        "seed": subject.monitor.seed,
    }
    metadata = {
        **describe_run(
            probes, subject.monitor.describe(), settings, config, subject.module
        ),
        "solver_used": share.solver,
        "notes": list(share.notes),
    }
    ledger = RiskLedger(
        _free(options.output, checkpoint),
        run=f"{checkpoint.path.stem}, {options.split} samples",
    )
    _record(ledger, metadata, probes, share, checkpoint)
    print(
        f"\n{checkpoint.path.name}: {len(probes)} samples of the {options.split} split "
        f"in {share.seconds:.1f} s\n\n{score_table(ledger.directory)}\n"
    )
    try:
        print(f"report: {write_report(ledger.directory)}")
    except ModuleNotFoundError as error:
        print(f"recorded in: {ledger.directory}; no report: {error}")


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
    subject: Subject, probes: ProbeSet, settings: Settings, checkpoint: Checkpoint
) -> Share:
    module, monitor = subject.module, subject.monitor
    gradients = GradientMap(module, monitor.criterion, dtype=_DTYPES[monitor.dtype])
    with observing(module):
        gradients.check(probes.x.to(module.device), probes.y.to(module.device))
    share = measure_share(
        module,
        gradients,
        probes,
        monitor.scores,
        settings,
        epoch=checkpoint.epoch,
        step=checkpoint.step,
        rank=0,
        world_size=1,
        solver=monitor.solver,
        max_memory=monitor.max_memory,
    )
    if share.error:
        raise RuntimeError(f"the samples can't be scored: {share.error}")
    return share


def _record(
    ledger: RiskLedger,
    metadata: dict[str, object],
    probes: ProbeSet,
    share: Share,
    checkpoint: Checkpoint,
) -> None:
    ledger.write_metadata(metadata)
    shown = pictures(probes)
    if shown is not None:
        ledger.write_probes(shown, probes.index, probes.y.numpy())
    epoch, step = checkpoint.epoch, checkpoint.step
    seconds = Row(epoch, step, None, None, "seconds", share.seconds)
    spectra = merge_spectra([share], probes.index, epoch, step)
    ledger.append([*share.rows, seconds], spectra)


def _free(asked: str | None, checkpoint: Checkpoint) -> Path:
    """A directory that holds nothing yet: an audit never overwrites another."""
    beside = checkpoint.path.parent / "leakwatch-audit"
    path = beside if asked is None else Path(asked).expanduser()
    free, number = path, 0
    while free.exists() and (free.is_file() or any(free.iterdir())):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _device(asked: str | None, accelerator: str) -> torch.device:
    if asked is None:
        fast = accelerator != "cpu" and torch.cuda.is_available()
        return torch.device("cuda" if fast else "cpu")
    try:
        return torch.empty(0, device=asked).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"--device {asked} can't be used; expected cpu, or cuda where there is one "
            f"({str(error).splitlines()[0]})."
        ) from error
