"""``leakwatch trade-off``: what a defense costs in accuracy, and what it buys."""

from __future__ import annotations

import argparse
from collections.abc import Sized
from dataclasses import dataclass
from typing import Any, Literal, cast, final

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser
from torch import Tensor

from leakwatch.attacks.start import StartKind
from leakwatch.checks import check_integer
from leakwatch.cli.audit import add_cells, add_places
from leakwatch.cli.checkpoint import free_directory
from leakwatch.cli.subject import Subject, SubjectCLI, draw_for_study
from leakwatch.cli.tables import say_where
from leakwatch.cli.trade_training import (
    LightningTraining,
    WandbMode,
    accuracy_on,
    publish,
)
from leakwatch.cli.training import quiet
from leakwatch.defenses import Budget, Reduction
from leakwatch.defenses.budget import Unit
from leakwatch.derivatives import Prepare
from leakwatch.derivatives.runtime.rng_and_precision import isolated_rng
from leakwatch.probes import ProbeSet
from leakwatch.scores.api import PriorName
from leakwatch.studies import TradeOff, trade_off
from leakwatch.studies.paper_attacks import engine
from leakwatch.studies.trade_offs.grid import (
    check_coefficients,
    named_budgets,
    named_defenses,
)
from leakwatch.studies.trade_offs.outcomes import Attacker

# Mixtures are made with at most so many others.
_PARTNERS = 1000


@final
@dataclass(frozen=True)
class Trade:
    """What is compared; see `leakwatch.trade_off`.

    Args:
        defenses: Names: gaussian, pruning, eigen-smallest, eigen-waterfill, …
        budgets: Numbers in ``unit``, or budgets ``{value, unit}``, all of one unit.
        unit: relative to ‖g‖, norm, or std of each entry.
        mixup: Coefficients; each mixes every sample with another of the training data.
        queries: How often each gradient is asked for; attackers take the mean.
        seeds: How many seeds of data order and noise, or which.
        pretrain_epochs: Training without a defense before all of them begin.
        samples: How many are attacked.
        split: Where they come from.
        accuracy_on: Where accuracy is measured.
        attack: Name of a preset.
        steps: Of the attack.
        attackers: naive, estimating, adaptive.
        start: Where attacks begin: normal, uniform, zeros or near.
        radius: Of a near start, network-input units.
        restarts: Tries for each message.
        directions: How many eigen-smallest hides.
        box: R of eigen-waterfill, pixels; None: that of the data's prior.
        prior: What attackers know of images: data, natural or white; None: the
            statistics of the data where they were measured, else white.
        reduction: How the training loss combines samples.
        delta: δ at which the ε of differential privacy is stated; None: none is.
        wandb: off, offline or online.
        project: Of W&B.
        group: Of its runs.
    """

    defenses: tuple[str, ...] = ("gaussian", "pruning", "eigen-waterfill")
    budgets: tuple[float | Budget, ...] = (0.1, 1.0)
    unit: Unit = "relative"
    mixup: tuple[float, ...] = ()
    queries: int = 1
    seeds: int | list[int] = 1
    pretrain_epochs: int = 0
    samples: int = 4
    split: Literal["train", "val"] = "train"
    accuracy_on: Literal["test", "val"] = "test"
    attack: str = "gauss-newton"
    steps: int = 40
    attackers: tuple[Attacker, ...] = ("naive", "adaptive")
    start: StartKind = "uniform"
    radius: float = 0.1
    restarts: int = 1
    directions: int = 50
    box: float | None = None
    prior: PriorName | None = None
    reduction: Reduction = "mean"
    delta: float | None = None
    wandb: WandbMode = "offline"
    project: str = "leakwatch"
    group: str = "trade-off"

    def __post_init__(self) -> None:
        if self.samples < 1 or self.pretrain_epochs < 0:
            raise ValueError(
                "trade_off.samples must be at least 1 and trade_off.pretrain_epochs at "
                f"least 0, got {self.samples} and {self.pretrain_epochs}."
            )
        # Before data are loaded and networks built.
        check_coefficients(tuple(self.mixup))
        check_integer("trade_off.queries", self.queries)
        if self.defenses or not self.mixup:
            named_defenses(tuple(self.defenses), directions=self.directions, box=1.0)
        named_budgets(tuple(self.budgets), self.unit)
        engine(self.attack, self.steps)


@final
class TradeCLI(SubjectCLI):
    """Builds model and data of a config, and what is to be compared."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the group ``trade_off``."""
        super().add_arguments_to_parser(parser)
        parser.add_class_arguments(Trade, "trade_off")

    @property
    def trade(self) -> Trade:
        """What is to be compared."""
        return cast(Trade, self.config_init["trade_off"])

    @property
    def trainer_arguments(self) -> dict[str, Any]:
        """The config's keywords of ``Trainer``."""
        return dict(self.config_init["trainer"])


def compare_defenses(argv: list[str]) -> None:
    """Compare defenses, print a table, write a report, log to W&B.

    Args:
        argv: Command line after ``leakwatch trade-off``.

    Raises:
        argparse.ArgumentError: The command line or a config can't be understood.
        RuntimeError: Every cell failed.
        ValueError: The samples can't be probed, or settings don't fit each other.
    """
    parser = argparse.ArgumentParser(
        prog="leakwatch trade-off",
        description="Train one network under each of several defenses and budgets, "
        "measure its accuracy, attack what it shares, and draw one against the other: "
        "a table, a figure, a report.",
        epilog="All options of `leakwatch fit` are understood as well, --config above "
        "all: model, data and training are those of the config. The group `trade_off` "
        "holds what is compared: --trade_off.defenses, budgets, unit, mixup, seeds, "
        "samples, queries, attack, steps, attackers, pretrain_epochs, wandb and more; "
        "see leakwatch:trade_off.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    add_places(parser, "tables and report", "leakwatch-trade-off here")
    add_cells(parser)
    options, rest = parser.parse_known_args(argv)
    with quiet():
        cli = TradeCLI.read("trade-off", rest)
        study = _measure(cli, cli.subject(), options)
    print(f"\n{study.table()}\n\n{study.conclusion()}\n")
    saved = study.save(free_directory(options.output, None, "trade-off"))
    asked = cli.trade
    for sentence in publish(
        study,
        saved.parent,
        mode=asked.wandb,
        project=asked.project,
        group=asked.group,
    ):
        print(sentence)
    say_where(saved)
    if all(not cell.status.usable for cell in study.cells):
        raise RuntimeError(
            f"every cell of the grid failed; the first: {study.cells[0].status}"
        )


def _measure(cli: TradeCLI, subject: Subject, options: argparse.Namespace) -> TradeOff:
    asked = cli.trade
    probes, prepare = draw_for_study(subject, asked.split, asked.samples)
    _check_prepared(asked, subject, prepare)
    module, data = subject.module, subject.data
    subject.move_to(options.device)
    own = data if isinstance(data, LightningDataModule) else None
    train = LightningTraining(cli.trainer_arguments, own, asked.reduction, asked.delta)
    accuracy = accuracy_on(data, asked.accuracy_on)
    if asked.pretrain_epochs:
        before = {"max_epochs": asked.pretrain_epochs, "max_steps": -1}
        first = LightningTraining({**cli.trainer_arguments, **before}, own)
        with isolated_rng(0):
            first(module, None, 0)
        print(f"before any defense: accuracy {100 * accuracy(module):.1f} %")
    return trade_off(
        module,
        probes.x,
        probes.y,
        train,
        accuracy,
        defenses=asked.defenses,
        budgets=asked.budgets,
        unit=asked.unit,
        mixup=asked.mixup,
        partners=_partners(subject, probes) if asked.mixup else None,
        queries=asked.queries,
        seeds=asked.seeds,
        attack=asked.attack,
        steps=asked.steps,
        attackers=asked.attackers,
        start=asked.start,
        radius=asked.radius,
        restarts=asked.restarts,
        directions=asked.directions,
        box=asked.box,
        mean=probes.mean,
        std=probes.std,
        data_range=probes.data_range,
        **_assumed(asked.prior, probes),
        index=probes.index,
        class_names=probes.class_names,
        prepare=prepare,
        progress=lambda line: print(line, flush=True),
        n_jobs=options.jobs,
        keep_cells=options.cells,
    )


def _check_prepared(asked: Trade, subject: Subject, prepare: Prepare | None) -> None:
    """Raise where training defends other inputs than those that are attacked."""
    if subject.monitor.prepare is not None:
        raise ValueError(
            "the config's prepare= says that the training step prepares its inputs, "
            "which neither defenses nor the measurement of accuracy can repeat; do "
            "that in the data set's transform, in on_after_batch_transfer or in forward"
        )
    if prepare is None:
        return
    made = {}
    if asked.defenses:
        named = tuple(asked.defenses)
        made = named_defenses(named, directions=asked.directions, box=1.0)
    looking = [
        name
        for name, make in made.items()
        if make(Budget(1.0)).needs in ("jacobian", "samples")
    ]
    looking += ["mixup"] if asked.mixup else []
    if looking:
        raise ValueError(
            f"{' and '.join(looking)} would protect inputs as training prepares them, "
            "and attacks look for inputs as the data set has them; prepare them in the "
            "data set's transform, or compare defenses of gradients such as gaussian."
        )


def _assumed(prior: PriorName | None, probes: ProbeSet) -> dict[str, Any]:
    """What attackers know of images: the statistics of the data, if not said."""
    if prior == "natural":
        return {"prior": prior}
    if prior == "white" or (prior is None and probes.prior is None):
        mean = torch.as_tensor(probes.prior_mean)
        return {"prior_std": probes.prior_std, "prior_mean": mean}
    return {"prior": probes.prior or prior}


def _partners(subject: Subject, probes: ProbeSet) -> tuple[Tensor, Tensor]:
    """Training samples to mix with, none of which is attacked."""
    # Sized, or no sample could have been drawn.
    size = len(cast(Sized, subject.data.train_dataloader().dataset))
    count = min(size, _PARTNERS + len(probes))
    candidates, _ = draw_for_study(subject, "train", count)
    mine = torch.stack([(candidates.x == x).flatten(1).all(1) for x in probes.x]).any(0)
    return candidates.x[~mine], candidates.y[~mine]
