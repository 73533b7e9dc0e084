"""``leakwatch compare-inits``: which initialisation of a network leaks least."""

from __future__ import annotations

import argparse
import importlib
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast, final

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser
from torch import nn

from leakwatch.attacks.start import StartKind
from leakwatch.checks import check_dtype
from leakwatch.cli.audit import add_cells, add_places
from leakwatch.cli.checkpoint import free_directory
from leakwatch.cli.subject import Subject, SubjectCLI, draw_for_study
from leakwatch.cli.tables import say_where
from leakwatch.cli.training import quiet
from leakwatch.models.initialization import Initializer
from leakwatch.scores.measure.plan import Solver
from leakwatch.studies import compare_initializations
from leakwatch.studies.initializations.result import InitializationComparison
from leakwatch.studies.initializations.study import SCHEMES


@final
@dataclass(frozen=True)
class Compare:
    """What is compared; see `leakwatch.compare_initializations`.

    Args:
        schemes: Names of initialisations, or dotted paths of functions
            ``(module, generator) -> None``, such as ``my_module.my_init``.
        seeds: How many seeds of the weights, or which.
        samples: How many samples.
        noise_std: Standard deviation of the noise on each entry of the gradient.
        attacks: ``dgl`` and ``gs`` as in I²F, or presets; [] for scores only.
        steps: Of each attack.
        repeats: How often each sample is attacked.
        start: Where attacks begin: normal, uniform, zeros or near.
        radius: Distance of a near start, network-input units.
        epochs: Training after which all is measured again; 0 for none.
        epsilon: Damping of I²F.
        solver: How eigenvalues are found: auto, exact, lanczos or power.
        dtype: Arithmetic of the scores.
        split: Where the samples come from.
    """

    schemes: tuple[str, ...] = SCHEMES
    seeds: int | list[int] = 3
    samples: int = 10
    noise_std: float = 1e-2
    attacks: tuple[str, ...] = ("dgl", "gs")
    steps: int = 300
    repeats: int = 3
    start: StartKind = "normal"
    radius: float = 0.1
    epochs: int = 0
    epsilon: float = 0.0
    solver: Solver = "auto"
    dtype: Literal["float32", "float64"] = "float64"
    split: Literal["train", "val"] = "train"

    def __post_init__(self) -> None:
        if self.samples < 1 or self.epochs < 0:
            raise ValueError(
                "compare.samples must be at least 1 and compare.epochs at least 0, got "
                f"{self.samples} and {self.epochs}."
            )


@final
class CompareCLI(SubjectCLI):
    """Builds model and data of a config, and what is to be compared."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the group ``compare``."""
        super().add_arguments_to_parser(parser)
        parser.add_class_arguments(Compare, "compare")

    @property
    def compare(self) -> Compare:
        """What is to be compared."""
        return cast(Compare, self.config_init["compare"])

    @property
    def trainer_arguments(self) -> dict[str, Any]:
        """The config's keywords of ``Trainer``, without what a run would record."""
        return {
            **self.config_init["trainer"],
            "max_epochs": self.compare.epochs,
            "callbacks": [],
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }


def compare_inits(argv: list[str]) -> None:
    """Compare initialisations, print a table and the ranking, write a report.

    Args:
        argv: Command line after ``leakwatch compare-inits``.

    Raises:
        argparse.ArgumentError: The command line or a config can't be understood.
        ValueError: The samples can't be probed, or settings don't fit each other.
    """
    parser = argparse.ArgumentParser(
        prog="leakwatch compare-inits",
        description="Initialise one network in several ways under several seeds, and "
        "compare what its gradients give away: scores, attacks, a ranking, a report.",
        epilog="All options of `leakwatch fit` are understood as well, --config above "
        "all: model and data are those of the config. The group `compare` holds what "
        "is compared: --compare.schemes, seeds, samples, noise_std, attacks, steps, "
        "repeats, start, epochs and more; see leakwatch:compare_inits.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    add_places(parser, "tables and report", "leakwatch-compare-inits here")
    add_cells(parser)
    options, rest = parser.parse_known_args(argv)
    with quiet():
        cli = CompareCLI.read("compare-inits", rest)
        comparison = _measure(cli, cli.subject(), options)
    print(f"\n{_summary(comparison)}\n")
    say_where(comparison.save(free_directory(options.output, None, "compare-inits")))


def _measure(
    cli: CompareCLI, subject: Subject, options: argparse.Namespace
) -> InitializationComparison:
    asked = cli.compare
    probes, prepare = draw_for_study(subject, asked.split, asked.samples)
    subject.move_to(options.device)
    return compare_initializations(
        subject.module,
        probes.x,
        probes.y,
        [_scheme(name) for name in asked.schemes],
        seeds=asked.seeds,
        noise_std=asked.noise_std,
        attacks=asked.attacks,
        steps=asked.steps,
        repeats=asked.repeats,
        start=asked.start,
        radius=asked.radius,
        train=_training(cli, subject) if asked.epochs else None,
        mean=probes.mean,
        std=probes.std,
        data_range=probes.data_range,
        prior_std=None if probes.prior else probes.prior_std,
        prior=probes.prior,
        prepare=prepare,
        epsilon=asked.epsilon,
        solver=asked.solver,
        dtype=check_dtype(asked.dtype),
        index=probes.index,
        class_names=probes.class_names,
        progress=lambda line: print(line, flush=True),
        n_jobs=options.jobs,
        keep_cells=options.cells,
    )


def _scheme(name: str) -> str | Initializer:
    """A registered name, or the function that a dotted path names."""
    module, _, function = name.rpartition(".")
    if not module:
        return name
    try:
        return cast(Initializer, getattr(importlib.import_module(module), function))
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"compare.schemes: there is no function {name} ({error}); expected the "
            "name of an initialisation, or module.function."
        ) from error


def _training(cli: CompareCLI, subject: Subject) -> Callable[[nn.Module], object]:
    data = subject.data if isinstance(subject.data, LightningDataModule) else None

    def train(net: nn.Module) -> None:
        Trainer(**cli.trainer_arguments).fit(cast(Any, net), datamodule=data)

    return train


def _summary(comparison: InitializationComparison) -> str:
    parts = []
    for moment in comparison.moments:
        when = "At initialisation" if moment == "initial" else "After training"
        parts.append(textwrap.fill(f"{when}: {comparison.conclusion(moment)}", 88))
        parts.append(f"Means over seeds and samples:\n\n{comparison.table(moment)}")
        names = (None, *comparison.attacks)
        parts += [str(comparison.verdict(name, moment)) for name in names]
    return "\n\n".join(parts)
