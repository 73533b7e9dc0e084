"""What callbacks that watch fixed samples have in common: when, on what, and where."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from leakwatch.callbacks._probing.distributed import refuse_sharded
from leakwatch.callbacks._probing.schedule import never_due
from leakwatch.callbacks._probing.session import Session, checked_map
from leakwatch.callbacks._probing.state import Progress
from leakwatch.callbacks._probing.step import Share
from leakwatch.callbacks._recording.loggers import warn
from leakwatch.callbacks._recording.run_metadata import natural_directory
from leakwatch.checks import (
    check_channels,
    check_flag,
    check_integer,
    check_name,
    check_number,
    check_path,
    check_scores,
)
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.runtime.rng_and_precision import isolated_rng
from leakwatch.probes import ProbeSet
from leakwatch.reporting import Row
from leakwatch.reporting.message import GRADIENT, Message
from leakwatch.scores import Settings, resolve
from leakwatch.scores.measure.plan import Solver, check_solver

__all__ = ["ProbeCallback"]

_DTYPES = ("float32", "float64")
_ALWAYS = ("grad_norm", "loss")


class ProbeCallback(Callback):
    """Base of the callbacks that measure something about fixed training samples.

    It decides when and on which samples, keeps the record, and answers for training
    being left alone; what is measured is up to :meth:`measure`. Not for use by itself.

    Arguments are those of :class:`leakwatch.callbacks.LeakageMonitor`.
    """

    #: What clients share, in the words of the report.
    message: ClassVar[Message] = GRADIENT

    def __init__(
        self,
        probes: ProbeSet | int,
        scores: Sequence[str],
        *,
        every_n_epochs: int,
        at_start: bool,
        noise_std: float | None,
        epsilon: float,
        prior_std: float | None,
        data_range: float | None,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        target_psnr: float,
        criterion: Callable[[nn.Module, Tensor, Tensor], Tensor] | None,
        solver: str,
        dtype: str,
        max_memory: float,
        products: int,
        seed: int,
        directory: str | None,
        report: bool,
        log_images: bool,
        verbose: bool,
        name: str,
    ) -> None:
        super().__init__()
        if isinstance(probes, bool) or not isinstance(probes, ProbeSet | int):
            raise TypeError(
                f"probes must be a ProbeSet or how many to draw, got "
                f"{type(probes).__name__}; for instance probes=32 or "
                f"probes=ProbeSet.from_dataset(dataset)."
            )
        if isinstance(probes, int):
            check_integer("probes", probes, example=32)
        elif mean is not None or std is not None:
            raise ValueError(
                "mean and std are for probes that the callback draws; a ProbeSet has "
                "its own: ProbeSet.from_dataset(dataset, mean=..., std=...)."
            )
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be 'float32' or 'float64', got {dtype!r}.")
        if criterion is not None and not callable(criterion):
            raise TypeError(
                "criterion must be a function criterion(module, x, y) that returns one "
                f"loss per sample, got {type(criterion).__name__}."
            )
        self.scores = resolve([*check_scores(scores), *_ALWAYS])
        self.solver: Solver = check_solver(solver)
        self.every_n_epochs = check_integer(
            "every_n_epochs", every_n_epochs, example=5, smallest=1
        )
        self.at_start = check_flag("at_start", at_start)
        self.noise_std = _optional("noise_std", noise_std, 1e-4)
        self.epsilon = check_number("epsilon", epsilon, "[0, inf)", example=0.0)
        self.prior_std = _optional("prior_std", prior_std, 0.25)
        self.data_range = _optional("data_range", data_range, 1.0)
        self.mean: tuple[float, ...] | None
        self.std: tuple[float, ...] | None
        self.mean, self.std = check_channels(mean, std)
        self.target_psnr = check_number(
            "target_psnr", target_psnr, "(-inf, inf)", example=20.0
        )
        self.criterion = criterion
        self.dtype = dtype
        self.max_memory = check_number("max_memory", max_memory, example=2048)
        self.products = check_integer("products", products, example=100)
        self.seed = check_integer("seed", seed, smallest=0)
        self.directory = check_path("directory", directory)
        self.report = check_flag("report", report)
        self.log_images = check_flag("log_images", log_images)
        self.verbose = check_flag("verbose", verbose)
        self.name = check_name("name", name)
        self.given = probes
        self.parameters: str | Sequence[str] | None = None
        self._progress = Progress()
        self._probes = probes if isinstance(probes, ProbeSet) else None
        self._loaded: Progress | None = None
        self._session: Session | None = None
        self._ended = ("", 0)

    # -- what is measured ----------------------------------------------------------

    @abstractmethod
    def measure(
        self,
        module: LightningModule,
        gradients: GradientMap,
        probes: ProbeSet,
        settings: Settings,
        *,
        epoch: int,
        step: int,
        rank: int,
        world_size: int,
    ) -> Share:
        """Measures probes rank, rank + world_size, …; never raises an error.

        Args:
            module: the network, left as it was.
            gradients: its gradient map.
            probes: all probes.
            settings: noise, prior and pixels.
            epoch: completed epochs.
            step: optimiser steps.
            rank: of this process.
            world_size: number of processes.
        """

    @abstractmethod
    def describe(self) -> dict[str, dict[str, str]]:
        """Unit, direction, meaning and source of each quantity that is recorded."""

    @abstractmethod
    def settled(self) -> dict[str, Any]:
        """The arguments that the record of a run should state."""

    def examine(
        self, module: LightningModule, gradients: GradientMap, probes: ProbeSet
    ) -> None:
        """Refuses, before training, what :meth:`measure` could never do.

        Args:
            module: the network.
            gradients: its gradient map.
            probes: all probes.
        """

    def conclude(self, rows: Sequence[Row], epoch: int, step: int) -> list[Row]:
        """What follows from the rows of all processes; the same in each of them."""
        return []

    def sentence(self, rows: Sequence[Row]) -> str | None:
        """The line to print after a step, instead of the default one."""
        return None

    # -- policy --------------------------------------------------------------------

    def should_probe(self, step: int, epoch: int | None) -> bool:
        """Whether to probe now; override for another schedule.

        Asked once before training, then after each optimiser step and at the end of
        each epoch. Must give the same answer in every process.

        Args:
            step: optimiser steps taken, ``trainer.global_step``: with two optimisers
                both count.
            epoch: completed epochs where one has just ended (0 before training), else
                ``None``.

        Returns:
            By default: before training if ``at_start``, then every
            ``every_n_epochs``-th epoch.
        """
        if epoch is None:
            return False
        return self.at_start if epoch == 0 else epoch % self.every_n_epochs == 0

    @property
    def probes(self) -> ProbeSet | None:
        """The samples watched; ``None`` until they are drawn."""
        return self._probes

    @property
    def run_directory(self) -> str | None:
        """Where ledger and report are; ``None`` before training or without any."""
        return self._progress.directory or None

    # -- hooks ---------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses what can't work, as early as it can be known."""
        # Evaluation with a checkpoint loads callback states too: only this fit counts.
        self._loaded = None
        if stage != "fit":
            return
        refuse_sharded(trainer, type(self).__name__)
        callbacks: list[Callback] = getattr(trainer, "callbacks", [])
        for other in callbacks:
            if (
                isinstance(other, ProbeCallback)
                and other is not self
                and other.name == self.name
            ):
                raise RuntimeError(
                    f"two callbacks are called {self.name!r} and would log under the "
                    f"same keys; give one of them another name, for instance "
                    f"{type(self).__name__}(name='leakwatch-test')."
                )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks given probes as soon as the module is complete."""
        waiting = any(is_lazy(p) for p in pl_module.parameters())
        if isinstance(self.given, ProbeSet) and not waiting:
            with isolated_rng():
                checked_map(self, pl_module, self.given)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draws the probes, opens the ledger, and probes the network as it starts."""
        natural = natural_directory(trainer, self.directory, self.name)
        step, loaded = trainer.global_step, self._loaded
        if loaded is not None:
            self._progress, self._loaded = loaded, None
        elif step == 0 or (str(natural), step) != self._ended:
            self._progress = Progress()  # neither resumed nor one more fit()
        self._ended = (str(natural), step)
        self._warn_if_never_due(trainer)
        with isolated_rng():
            self._session = Session(self, trainer, pl_module, self._progress, natural)
        self._probes = self._session.probes
        if step == 0 and self._progress.epoch_asked < 0:
            self._ask(trainer, pl_module, epoch=0)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Probes after the last batch of an epoch, before validation."""
        ended = trainer.is_last_batch
        self._ask(
            trainer, pl_module, epoch=trainer.current_epoch + 1 if ended else None
        )
        if self._session is not None:
            self._session.offer(trainer, pl_module, on_step=True, ended=ended)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Probes where an epoch ended without a last batch (``max_steps``, skips)."""
        self._ask(trainer, pl_module, epoch=trainer.current_epoch + 1)
        if self._session is not None:
            self._session.offer(trainer, pl_module, on_step=False, ended=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the report."""
        self._finish(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Writes the report about what was recorded until training broke off."""
        self._finish(trainer)

    # -- state ---------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """Two monitors in one run keep their states apart."""
        return self._generate_state_key(name=self.name)

    def state_dict(self) -> dict[str, Any]:
        """Schedule, position in the ledger and latest values; no pixel of any probe."""
        if self._session is not None:
            self._progress.elapsed = self._session.elapsed
        return self._progress.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where the checkpoint was made."""
        self._loaded = Progress.from_state(state_dict)

    # -- what the hooks do -----------------------------------------------------------

    def _ask(
        self, trainer: Trainer, pl_module: LightningModule, *, epoch: int | None
    ) -> None:
        step = trainer.global_step
        if self._session is None or not self._progress.is_new(step, epoch):
            return
        if self.should_probe(step, epoch):
            completed = trainer.current_epoch if epoch is None else epoch
            with isolated_rng():  # loggers and figures may draw random names
                self._session.probe(trainer, pl_module, completed, step)

    def _warn_if_never_due(self, trainer: Trainer) -> None:
        """Nothing is said of a schedule of one's own, or where there is a record."""
        own = type(self).should_probe is not ProbeCallback.should_probe
        starts = self.at_start and trainer.global_step == 0
        if not (own or starts or self._progress.position):
            text = never_due(type(self).__name__, self.every_n_epochs, trainer)
            if text:
                warn(text)

    def _finish(self, trainer: Trainer) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._ended = (self._ended[0], trainer.global_step)
            with isolated_rng():
                session.finish(trainer)


def _optional(name: str, value: Any, example: float) -> float | None:
    return None if value is None else check_number(name, value, example=example)
