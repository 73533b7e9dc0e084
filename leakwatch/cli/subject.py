"""What an audit is about, built from the config of a training run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, final

import torch
from lightning.pytorch import LightningDataModule, LightningModule

from leakwatch.callbacks import GradientDefense, InversionAudit, LeakageMonitor
from leakwatch.callbacks._probing.class_weights import LossFactors
from leakwatch.callbacks._probing.observing import observing
from leakwatch.callbacks._probing.preparation import normalizing
from leakwatch.callbacks._probing.training_probes import SampleSource
from leakwatch.callbacks.probe_callback import ProbeCallback
from leakwatch.cli.checkpoint import Checkpoint
from leakwatch.cli.training import ConfiguredCLI
from leakwatch.derivatives import Prepare
from leakwatch.derivatives.runtime import as_evaluated
from leakwatch.normalization import to_input, to_pixels
from leakwatch.probes import ProbeSet

# Of a monitor: what an audit of the same samples has to take for granted, too.
_ASSUMED = (
    "probes",
    "noise_std",
    "parameters",
    "prior",
    "prior_std",
    "data_range",
    "mean",
    "std",
    "criterion",
    "prepare",
    "dtype",
    "epsilon",
    "target_psnr",
    "max_memory",
    "seed",
)


@final
@dataclass(frozen=True)
class Subject:
    """What is audited, and how: all that a config says about it.

    Attributes:
        module: The model, with the weights of its initialisation.
        data: Where samples come from: the datamodule, or else the model.
        monitor: Whose settings apply; never attached to a trainer.
        accelerator: What the config would train on.
        note: What the user should know about the choice; empty if nothing.
        defended: Whether training under the config goes through a GradientDefense.
    """

    module: LightningModule
    data: LightningDataModule | LightningModule
    monitor: ProbeCallback
    accelerator: str
    note: str
    defended: bool

    def move_to(self, device: str | None) -> None:
        """Move the model to the device that was asked for, or that would train it.

        Args:
            device: Such as "cpu" or "cuda:1"; None: as the config says.

        Raises:
            ValueError: There is no such device here.
        """
        if device is None:
            fast = self.accelerator != "cpu" and torch.cuda.is_available()
            device = "cuda" if fast else "cpu"
        try:
            place = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError) as error:
            raise ValueError(
                f"--device {device} can't be used; expected cpu, or cuda where there "
                f"is one ({str(error).splitlines()[0]})."
            ) from error
        self.module.to(place)


class SubjectCLI(ConfiguredCLI):
    """Builds model, data and monitor of a config, but no trainer and no logger.

    Attributes:
        kind: Which callback's settings apply.
    """

    kind: type[LeakageMonitor] | type[InversionAudit] = LeakageMonitor

    def before_instantiate_classes(self) -> None:
        """Leave out all that a run would need and an audit does not."""
        trainer = self.config["trainer"]
        callbacks = trainer.get("callbacks") or []
        if not isinstance(callbacks, list):
            callbacks = [callbacks]
        kinds = [_class_of(entry) for entry in callbacks]
        self.defended = any(issubclass(kind, GradientDefense) for kind in kinds)
        entries = list(zip(callbacks, kinds, strict=True))
        chosen = [entry for entry, kind in entries if issubclass(kind, self.kind)]
        self.note = ""
        if not chosen:
            monitors = [e for e, kind in entries if issubclass(kind, LeakageMonitor)]
            chosen = self.instead(monitors)
        trainer["callbacks"] = chosen
        trainer["logger"] = False

    def instead(self, monitors: list[Any]) -> list[Any]:
        """What applies where the config has no callback of this kind; sets the note.

        Args:
            monitors: Its monitors, as the config has them.
        """
        kind = self.kind.__name__
        self.note = f"The config has no {kind}; its default settings apply."
        return []

    def instantiate_classes(self) -> None:
        """Instantiate without a trainer."""
        self.config_init = self.parser.instantiate_classes(self.config)

    @classmethod
    def read(cls, command: str, arguments: list[str]) -> Self:
        """Build what the options of LightningCLI describe.

        Args:
            command: For messages.
            arguments: Config and what overrides it.

        Raises:
            argparse.ArgumentError: They can't be understood.
        """
        return cls(
            args=arguments,
            run=False,
            seed_everything_default=0,
            save_config_callback=None,
            load_from_checkpoint_support=False,
            parser_kwargs={"prog": f"leakwatch {command}", "exit_on_error": False},
        )

    def subject(self, name: str | None = None) -> Subject:
        """Return what the config describes, its model complete.

        Args:
            name: Of the monitor whose settings apply; None: the first one.
        """
        module, data = self.config_init["model"], self.config_init.get("data")
        module.configure_model()
        monitors = self.config_init["trainer"]["callbacks"]
        kind, note = self.kind.__name__, self.note
        if any(monitor.name == name for monitor in monitors):
            monitors = [monitor for monitor in monitors if monitor.name == name]
        elif len(monitors) > 1:
            note = f"The config has {len(monitors)} {kind}s; the first applies."
        return Subject(
            module=module,
            data=module if data is None else data,
            monitor=monitors[0] if monitors else self.kind(),
            accelerator=str(self.config["trainer"].get("accelerator")),
            note=note,
            defended=self.defended,
        )


@final
class AttackCLI(SubjectCLI):
    """The same for what is to be attacked."""

    kind = InversionAudit

    def instead(self, monitors: list[Any]) -> list[Any]:
        """An audit of what the first monitor watches, under its assumptions."""
        if not monitors:
            return super().instead(monitors)
        entry = monitors[0].clone()
        assumed = entry["init_args"]
        for name in [name for name in vars(assumed) if name not in _ASSUMED]:
            assumed.pop(name)
        entry["class_path"] = f"{InversionAudit.__module__}.{InversionAudit.__name__}"
        self.note = (
            f"The config has no InversionAudit; samples, noise (noise_std="
            f"{assumed['noise_std']:g}) and attacker are those of its LeakageMonitor, "
            f"all else is default."
        )
        return [entry]


def draw(
    subject: Subject,
    checkpoint: Checkpoint | None,
    split: Literal["train", "val"],
    count: int | None,
    recorded: Mapping[str, Any] | None = None,
) -> tuple[ProbeSet, Prepare | None, list[str]]:
    """Draw the samples to score.

    Those of the training split are the ones that the run watched, if the checkpoint
    says which; else they are drawn as the monitor would have drawn them.

    Args:
        subject: The subject; its data is prepared and set up here.
        checkpoint: What was saved; None for a network that was not trained.
        split: Where the samples come from.
        count: How many; None: as the monitor's settings say.
        recorded: What a record that is repeated says about its samples.

    Returns:
        The samples, what becomes of them before the network gets them, and what the
        user should know about both.

    Raises:
        TypeError: There is no map-style data set to draw from.
        ValueError: Its samples can't be probed; see `ProbeSet`.
    """
    data, monitor = subject.data, subject.monitor
    if isinstance(data, LightningDataModule):
        data.prepare_data()
        data.setup("fit")
    if isinstance(monitor.given, ProbeSet):
        return monitor.given, monitor.prepare, []
    training = split == "train"
    source = SampleSource(
        data.train_dataloader() if training else data.val_dataloader(),
        data,
        training,
        module=subject.module,
    )
    state = recorded or _saved(subject, checkpoint)
    wanted = monitor.given if count is None else count
    watched = state.get("indices") if training or recorded else None
    again = isinstance(watched, list | tuple) and len(watched) == wanted
    probes = monitor.draw(source, watched if again else None, n=wanted)
    prepare, why, _ = monitor.preparation(source, probes)
    notes = [f"Samples don't go through all that training does: {why}."] if why else []
    if again and probes.fingerprint() != state.get("fingerprint"):
        notes.append(
            "The samples are not those that the run watched under the same indices: "
            "the config's data or normalisation is another."
        )
    return probes, prepare, notes


def loss_factors(
    subject: Subject,
    checkpoint: Checkpoint | None,
    recorded: Mapping[str, float] | None,
) -> LossFactors:
    """Return by how much training multiplied losses, as the run has seen it.

    Args:
        subject: The subject.
        checkpoint: What was saved; None for a network that was not trained.
        recorded: What a record that is repeated says; None for none.
    """
    state = _saved(subject, checkpoint).get("factors", {})
    return LossFactors.from_state(state if recorded is None else recorded)


def _saved(subject: Subject, checkpoint: Checkpoint | None) -> Mapping[str, Any]:
    """What a checkpoint knows of the callback, or of another monitor."""
    saved = {} if checkpoint is None else checkpoint.callbacks
    # An attack may ask about a run that was watched, but never attacked.
    state = saved.get(subject.monitor.saved_as) or _of_a_monitor(saved)
    return state if isinstance(state, Mapping) else {}


def draw_for_study(
    subject: Subject, split: Literal["train", "val"], count: int | None
) -> tuple[ProbeSet, Prepare | None]:
    """Draw samples for a study of networks that are trained as the config says.

    Args:
        subject: As in `draw`.
        split: The same.
        count: The same.

    Returns:
        The samples, normalised where that is all that training does to its batches;
        and what else becomes of them before the network gets them.

    Raises:
        ValueError: Samples can't be prepared as training prepares its batches; or as
            `draw`.
    """
    probes, prepare, notes = draw(subject, None, split, count)
    if notes:
        raise ValueError(f"{notes[0].rstrip('.')}; {_ELSEWHERE}")
    if prepare is None:
        return probes, None
    module, mean, std = subject.module, probes.mean, probes.std
    x = probes.x.to(next(module.parameters()).device)
    with observing(module), as_evaluated(module):
        there = prepare(x.clone())
        if there.requires_grad:
            raise ValueError(
                "what prepares batches uses weights, which are others in each network "
                f"that is compared; {_ELSEWHERE}"
            )
        found = normalizing(
            lambda pixels: prepare(to_input(pixels, mean, std)),
            to_pixels(x, mean, std),
        )
    if found is None or probes.units != "pixel":
        return probes, prepare
    return replace(probes, x=there.cpu(), mean=found[0], std=found[1]), None


_ELSEWHERE = (
    "do that in the data set's transform, or in forward, and start the command again."
)


def _class_of(entry: Any) -> type:
    """The class of a callback in a config; that of functions is of no interest."""
    module, _, name = str(entry["class_path"]).rpartition(".")
    member = getattr(importlib.import_module(module), name)
    return member if isinstance(member, type) else object


def _of_a_monitor(states: Mapping[str, Any]) -> Mapping[str, Any]:
    for key, state in states.items():
        if key.startswith("LeakageMonitor") and isinstance(state, Mapping):
            return state
    return {}
