"""``leakwatch fit``: training as LightningCLI does it, with a summary afterwards."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)
from lightning.pytorch.utilities.model_helpers import is_overridden

from leakwatch.callbacks.probe_callback import RecordingCallback
from leakwatch.cli.tables import run_table
from leakwatch.reporting import RiskLedger

_DATA = {"model", "train_dataloaders", "val_dataloaders", "datamodule"}
_ACCURACY = re.compile(r"(^|[/_. ])acc(uracy)?($|[/_. ])", re.IGNORECASE)


def fit(argv: list[str]) -> None:
    """Train what the config describes, then print how exposure went.

    Args:
        argv: Command line after ``leakwatch fit``: options of LightningCLI, such as
            ``["--config", "quickstart.yaml"]``.

    Raises:
        argparse.ArgumentError: The options or a config can't be understood.
        Exception: Whatever training raises.
    """
    accuracy = Accuracies()
    with quiet():
        cli = ConfiguredCLI(
            args=argv,
            run=False,
            seed_everything_default=0,
            save_config_callback=SaveConfigBesideLedger,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"callbacks": [accuracy]},
            parser_kwargs={
                "prog": "leakwatch fit",
                "description": "Train the model that one or more configs describe; "
                "later ones, and options, override earlier ones.",
                "exit_on_error": False,
            },
        )
        for monitor in recording(cli.trainer):
            monitor.subject = cli.described("fit")
        chosen = {name: cli.config_init[name] for name in cli.fit_arguments}
        cli.trainer.fit(cli.model, datamodule=cli.datamodule, **chosen)
    if cli.trainer.is_global_zero:
        _summarize(cli.trainer, accuracy.best())


class ConfiguredCLI(LightningCLI):
    """LightningCLI for the options of ``Trainer.fit``, without subcommands.

    A config needs no ``class_path`` for the model: `LitClassifier` then.

    Attributes:
        fit_arguments: Names of the options of ``Trainer.fit``.
        told: The config and what overrode it, as plain values.
    """

    fit_arguments: list[str]
    told: dict[str, Any]

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of ``Trainer.fit``, which saved configs contain."""
        self.fit_arguments = parser.add_method_arguments(Trainer, "fit", skip=_DATA)
        # With a class known beforehand, configs may come in any order.
        parser.set_defaults({"model": {"class_path": "leakwatch.models.LitClassifier"}})

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse without Lightning's warning that arguments were passed by a program."""
        self.config = parser.parse_args(args)  # type: ignore[arg-type]
        if not isinstance(self.config.get("trainer"), Namespace):
            raise ValueError(
                f"trainer must hold arguments of the Trainer, such as max_epochs: 5, "
                f"got {self.config.get('trainer')!r}."
            )
        self.told = json.loads(parser.dump(self.config, format="json", skip_none=False))

    def described(self, command: str, **also: Any) -> dict[str, Any]:
        """What it takes to build the same again, for the record of a run.

        Args:
            command: Which command was told so.
            also: What else it was told.
        """
        return {"command": command, **also, "config": self.told}

    def after_instantiate_classes(self) -> None:
        """Refuse a config without data.

        Raises:
            ValueError: Neither a datamodule nor a model with its own data.
        """
        built = self.config_init
        own = is_overridden("train_dataloader", built["model"], LightningModule)
        if built.get("data") is None and not own:
            raise ValueError(
                "the config names no data; add some, such as "
                "--config leakwatch:data/mnist_sample."
            )


@final
class SaveConfigBesideLedger(SaveConfigCallback):
    """Saves the config in the log directory and in that of the run's ledger.

    Some loggers share one directory between runs; the ledger never does.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the config where each monitor records."""
        if not trainer.is_global_zero:
            return
        for directory in recorded_runs(trainer):
            path = directory / self.config_filename
            path.touch(mode=0o600)
            self.parser.save(self.config, str(path), skip_none=False, overwrite=True)


@final
class Accuracies(Callback):
    """Collects accuracies that the model logs, by completed epochs."""

    def __init__(self) -> None:
        self._values: dict[str, dict[int, float]] = {}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collect what validation has just measured."""
        if not trainer.sanity_checking:
            self._collect(trainer, trainer.current_epoch + 1, fresh="val")

    def on_train_epoch_start(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        """Collect the training accuracy of the epoch before."""
        if trainer.current_epoch:
            self._collect(trainer, trainer.current_epoch, fresh="train")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collect the training accuracy of the last epoch."""
        self._collect(trainer, trainer.current_epoch, fresh="train")

    def best(self) -> tuple[str, Mapping[int, float]] | None:
        """Return name and values of the accuracy to show, validation first."""
        names = sorted(self._values, key=lambda name: not name.startswith("val"))
        return (names[0], self._values[names[0]]) if names else None

    def _collect(self, trainer: Trainer, epoch: int, fresh: str) -> None:
        for name, value in trainer.callback_metrics.items():
            if name.startswith(fresh) and _ACCURACY.search(name):
                self._values.setdefault(name, {})[epoch] = float(value)


def recording(trainer: Trainer) -> list[RecordingCallback]:
    """Return the trainer's callbacks that record."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [c for c in callbacks if isinstance(c, RecordingCallback)]


def recorded_runs(trainer: Trainer) -> list[Path]:
    """Return the directories in which the trainer's monitors record."""
    directories = [
        Path(m.run_directory) for m in recording(trainer) if m.run_directory is not None
    ]
    return [directory for directory in directories if directory.is_dir()]


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out what no user of a config can act upon.

    That is: deprecations inside of libraries, and the advice to use more loader
    processes, which are slower for data sets that lie in memory.
    """
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            # Ours call jsonargparse by the names that old and new versions know.
            warnings.filterwarnings(
                "ignore",
                category=category,
                module=r"(lightning|jsonargparse|torch|leakwatch\.cli)\b",
            )
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        yield


def _summarize(
    trainer: Trainer, accuracy: tuple[str, Mapping[int, float]] | None
) -> None:
    runs = recorded_runs(trainer)
    if not runs:
        print(
            "\nNothing was watched: trainer.callbacks has no LeakageMonitor and no "
            "InversionAudit; add "
            "--config leakwatch:monitor/default."
        )
    for directory in runs:
        if not RiskLedger(directory).position:
            print(
                f"\nNothing was recorded in {directory}: training ended before the "
                "schedule asked for anything; see every_n_epochs of its callback."
            )
            continue
        print(f"\n{run_table(directory, accuracy)}\n")
        report = directory / "report.html"
        print(f"report: {report}" if report.is_file() else f"recorded in: {directory}")
