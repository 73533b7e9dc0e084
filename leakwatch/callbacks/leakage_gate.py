"""LeakageGate: training warns, stops or fails where too much is exposed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

from lightning.pytorch import Callback, LightningModule, Trainer

from leakwatch.callbacks._recording.loggers import alert, warn
from leakwatch.callbacks.probe_callback import RecordingCallback
from leakwatch.checks import check_choice, check_flag, check_name, check_number
from leakwatch.names import meant
from leakwatch.reporting.statistics.gate import Limits

__all__ = ["GateError", "LeakageGate"]

_ACTIONS: Final = ("warn", "stop", "fail")


class GateError(RuntimeError):
    """Samples are more exposed than a :class:`LeakageGate` allows, or nobody knows."""


@final
class LeakageGate(Callback):
    """Checks what a monitor measures, at each of its probe steps.

    A value without a number breaks its limit unless told otherwise, and so do the mean
    of a class and a log key over samples of which one has no number, and a training in
    which nothing was measured: unknown is not safe. ``leakwatch check`` does the same
    to a recorded run.

    Args:
        max_psnr: dB that no sample may exceed: neither the predicted PSNR nor, where
            the monitor is an audit, what a conclusive attack achieved.
        share: of samples that may exceed it all the same, in [0, 1).
        max_class_psnr: dB that the mean predicted PSNR of no class may exceed.
        at_most: log key ↦ the highest value allowed, such as
            ``{"leakwatch/time_fraction": 0.1}``.
        at_least: log key ↦ the lowest value allowed.
        action: what to do where a limit is broken: ``"warn"``; ``"stop"``: also end
            training, as ``EarlyStopping`` does; ``"fail"``: raise :class:`GateError`.
        unknown: ``"fail"``: values without a number break their limit; ``"pass"``: they
            hold it, and a mean is that of the samples with a number.
        alert: send a W&B alert where there is a W&B logger.
        monitor: name of the callback that measures.

    Raises:
        TypeError: for arguments of the wrong kind.
        ValueError: for values out of range, or without any limit.
        RuntimeError: in ``setup``, if no callback is called ``monitor``.
        GateError: during training, with ``action="fail"``.

    Example:
        >>> from leakwatch.callbacks import LeakageGate, LeakageMonitor
        >>> callbacks = [LeakageMonitor(), LeakageGate(max_psnr=25, action="stop")]
    """

    def __init__(
        self,
        max_psnr: float | None = None,
        *,
        share: float = 0.0,
        max_class_psnr: float | None = None,
        at_most: Mapping[str, float] | None = None,
        at_least: Mapping[str, float] | None = None,
        action: str = "warn",
        unknown: str = "fail",
        alert: bool = True,
        monitor: str = "leakwatch",
    ) -> None:
        super().__init__()
        check_choice("action", action, _ACTIONS)
        check_choice("unknown", unknown, ("fail", "pass"))
        self.limits = Limits(
            _decibels("max_psnr", max_psnr),
            check_number("share", share, "[0, 1)", example=0.1),
            _decibels("max_class_psnr", max_class_psnr),
            _bounds("at_most", at_most),
            _bounds("at_least", at_least),
            unknown == "pass",
        )
        if not self.limits.any:
            raise ValueError(
                "a gate needs a limit; for instance LeakageGate(max_psnr=25)."
            )
        self.action = action
        self.alert = check_flag("alert", alert)
        self.monitor = check_name("monitor", monitor)
        self._judged: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses a trainer without the monitor."""
        self._judged = None
        if stage == "fit":
            self._watched(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judges the network as it starts, where the gate comes after the monitor."""
        self._judge(trainer)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Judges what the monitor has just measured."""
        self._judge(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The same where the gate comes before the monitor."""
        self._judge(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judges what is left, and a training in which nothing was measured."""
        self._judge(trainer)
        if self._judged is None and not self.limits.unknown_passes:
            self._act(trainer, ["nothing was measured"])

    def _judge(self, trainer: Trainer) -> None:
        watched = self._watched(trainer)
        rows = watched.latest_rows
        if not rows or rows is self._judged:
            return
        self._judged = rows
        names = None if watched.probes is None else watched.probes.class_names
        broken = self.limits.broken(
            rows, watched.describe(), names, prefix=watched.name
        )
        if broken:
            self._act(trainer, broken)

    def _act(self, trainer: Trainer, broken: list[str]) -> None:
        text = f"the gate on {self.monitor!r} is broken: {'; '.join(broken)}"
        if self.alert and trainer.is_global_zero:
            for refusal in alert(trainer.loggers, "leakwatch: gate broken", text):
                warn(refusal)
        if self.action == "fail":
            raise GateError(text)
        warn(text + ("; training stops" if self.action == "stop" else ""))
        if self.action == "stop":
            trainer.should_stop = True

    def _watched(self, trainer: Trainer) -> RecordingCallback:
        callbacks: list[Callback] = getattr(trainer, "callbacks", [])
        found = {c.name: c for c in callbacks if isinstance(c, RecordingCallback)}
        if self.monitor not in found:
            near = meant(self.monitor, found)
            raise RuntimeError(
                f"LeakageGate(monitor={self.monitor!r}) finds no callback of that "
                f"name; {near}the Trainer has "
                f"{', '.join(map(repr, found)) or 'none'}. Add LeakageMonitor() to its "
                "callbacks."
            )
        return found[self.monitor]


def _decibels(name: str, value: Any) -> float | None:
    return (
        None if value is None else check_number(name, value, "(-inf, inf)", example=25)
    )


def _bounds(name: str, given: Mapping[str, float] | None) -> dict[str, float]:
    if not isinstance(given, Mapping | None):
        raise TypeError(
            f"{name} must map log keys to numbers, got {given!r}; for instance "
            f"{name}={{'leakwatch/time_fraction': 0.1}}."
        )
    return {
        str(key): check_number(f"{name}[{key!r}]", value, "(-inf, inf)", example=0.1)
        for key, value in (given or {}).items()
    }
