"""What callbacks that watch fixed samples have in common: when, on what, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack, cast, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from leakwatch.callbacks._probing.class_weights import LossFactors
from leakwatch.callbacks._probing.distributed import refuse_device, refuse_sharded
from leakwatch.callbacks._probing.options import (
    RecordOptions,
    check_options,
    with_options_of,
)
from leakwatch.callbacks._probing.placed import Placed
from leakwatch.callbacks._probing.preparation import Preparation
from leakwatch.callbacks._probing.run import Probing, checked_map
from leakwatch.callbacks._probing.schedule import never_due
from leakwatch.callbacks._probing.session import ProbeSession
from leakwatch.callbacks._probing.state import Progress
from leakwatch.callbacks._probing.training_gradient import TrainingComparison
from leakwatch.callbacks._probing.training_probes import SampleSource, training_probes
from leakwatch.callbacks._probing.training_step import training_step_losses
from leakwatch.callbacks._recording.loggers import warn
from leakwatch.callbacks._recording.recorder import Warn
from leakwatch.callbacks._recording.run_metadata import natural_directory
from leakwatch.callbacks.gradient_defense import GradientDefense
from leakwatch.checks import (
    check_choice,
    check_criterion,
    check_dtype,
    check_flag,
    check_function,
    check_integer,
    check_name,
    check_number,
    check_path,
    check_scores,
)
from leakwatch.derivatives import Criterion, GradientMap
from leakwatch.derivatives.parameter_filters import check_filter
from leakwatch.derivatives.runtime.rng_and_precision import isolated_rng
from leakwatch.normalization import (
    Channels,
    check_channels,
    check_normalization,
)
from leakwatch.priors import GaussianPrior
from leakwatch.probes import ProbeSet
from leakwatch.reporting import Row
from leakwatch.reporting.message import GRADIENT
from leakwatch.scores import Scoring, resolve
from leakwatch.scores.api import DEFAULT_MAX_MEMORY, PriorName, check_prior
from leakwatch.scores.measure.plan import (
    DEFAULT_PRODUCTS,
    PrecisionName,
    Solver,
    check_solver,
)

__all__ = ["ProbeCallback", "RecordingCallback"]

_ALWAYS = ("grad_norm", "loss")


class RecordingCallback(Placed, Probing):
    """Base of the callbacks that measure something about samples of the training data.

    It decides when, keeps the record, and answers for training being left alone. What
    is measured, and of which samples, is up to a subclass: see
    :class:`leakwatch.callbacks._probing.run.Probing`. Not for use by itself.

    Arguments are those of :class:`leakwatch.callbacks.LeakageMonitor`.

    Attributes:
        resolve_scores: names of scores and groups ↦ what is computed.
    """

    resolve_scores = staticmethod(resolve)

    def __init__(
        self,
        scores: Sequence[str],
        *,
        noise_std: float | None,
        products: int,
        name: str,
        at_start: bool = False,
        every_n_epochs: int = 1,
        epsilon: float = 0.0,
        prior_std: float | None = None,
        data_range: float | None = None,
        mean: Channels | None = None,
        std: Channels | None = None,
        criterion: Literal["training_step"]
        | Callable[[nn.Module, Tensor, Tensor], Tensor]
        | None = None,
        dtype: str | torch.dtype = "float32",
        max_memory: float = DEFAULT_MAX_MEMORY,
        seed: int = 0,
        directory: str | None = None,
        report: bool = True,
        live: bool = True,
        log: str = "summary",
        log_images: bool = False,
        log_ledger: bool = False,
        verbose: bool = True,
    ) -> None:
        super().__init__()
        if criterion == "training_step" and self.message is GRADIENT:
            criterion = training_step_losses
        check_criterion(criterion)
        self.scores = self.resolve_scores([*check_scores(scores), *_ALWAYS])
        self.every_n_epochs = check_integer("every_n_epochs", every_n_epochs, example=5)
        self.at_start = check_flag("at_start", at_start)
        self.noise_std = _optional("noise_std", noise_std, 1e-4)
        self.epsilon = check_number("epsilon", epsilon, "[0, inf)", example=0.0)
        self.prior_std = _optional("prior_std", prior_std, 0.25)
        self.data_range = _optional("data_range", data_range, 1.0)
        self.mean: tuple[float, ...] | None
        self.std: tuple[float, ...] | None
        self.mean, self.std = check_channels(mean, std)
        self.criterion = cast(Criterion | None, criterion)
        self.dtype = str(check_dtype(dtype)).removeprefix("torch.")
        self.max_memory = check_number("max_memory", max_memory, example=2048)
        self.products = check_integer("products", products, example=100)
        self.seed = check_integer("seed", seed, smallest=0)
        self.directory = check_path("directory", directory)
        self.report = check_flag("report", report)
        self.live = check_flag("live", live)
        check_choice("log", log, ("summary", "all"))
        self.logged = log  # a Trainer gives callbacks a method `log`
        self.log_images = check_flag("log_images", log_images)
        self.log_ledger = check_flag("log_ledger", log_ledger)
        self.verbose = check_flag("verbose", verbose)
        self.name = check_name("name", name)
        self._progress = Progress()
        self._probes: ProbeSet | None = None
        self._loaded: Progress | None = None
        self._session: ProbeSession | None = None
        self._ended = ("", 0)
        self._defended_by_hand = False

    @property
    def scoring(self) -> Scoring:
        """How samples are scored: what the arguments say about it."""
        return Scoring(
            self.scores,
            noise_std=self.noise_std,
            epsilon=self.epsilon,
            prior_std=self.prior_std,
            prior="white",
            data_range=self.data_range,
            criterion=self.criterion,
            dtype=check_dtype(self.dtype),
            max_memory=self.max_memory,
            products=self.products,
        )

    def settled(self) -> dict[str, Any]:
        """The arguments that the record of a run states."""
        return {
            "name": self.name,
            "scores": [s.name for s in self.scores],
            "every_n_epochs": self.every_n_epochs,
            "dtype": self.dtype,
            "seed": self.seed,
        }

    def arguments(self) -> dict[str, Any]:
        """All that changes what is measured."""
        names = ("seed", "mean", "std", "every_n_epochs", "at_start")
        return super().arguments() | {name: getattr(self, name) for name in names}

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
    def latest_rows(self) -> Sequence[Row]:
        """What the last probe step of this training recorded, in every process."""
        return () if self._session is None else self._session.rows

    @property
    def run_directory(self) -> str | None:
        """Where ledger and report are; ``None`` before training or without any."""
        return self._progress.directory or None

    # -- hooks ---------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses what can't work, as early as it can be known."""
        # Evaluation with a checkpoint loads callback states too: only this fit counts.
        self._loaded = None
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        refuse_sharded(trainer, type(self).__name__)
        refuse_device(trainer, type(self).__name__)

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
        callbacks: list[Callback] = getattr(trainer, "callbacks", [])
        defenses = [c for c in callbacks if isinstance(c, GradientDefense)]
        with isolated_rng():
            self._session = ProbeSession(
                self,
                trainer,
                pl_module,
                self._progress,
                natural,
                defense=next((d.arguments() for d in defenses), None),
            )
        self._defended_by_hand = bool(defenses) and not pl_module.automatic_optimization
        self._probes = self._session.probes
        if step == 0 and self._progress.epoch_asked < 0:
            self._ask(trainer, pl_module, epoch=0)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Forms, for the first steps, the gradient that the criterion would share."""
        if self._comparison is not None:
            self._comparison.before(trainer, pl_module, batch)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps what a defense is about to change in manual optimisation."""
        if self._comparison is not None:
            self._comparison.backward()
            if self._defended_by_hand:
                self._comparison.look(trainer, pl_module, None)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Keeps the gradient that training shares, to compare it."""
        if self._comparison is not None:
            self._comparison.look(trainer, pl_module, optimizer)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Probes after the last batch of an epoch, before validation."""
        if self._comparison is not None:
            self._comparison.after(trainer, pl_module)
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
        if self._session is not None:
            self._session.broke_off(trainer, exception)
        self._finish(trainer)

    # -- state ---------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Schedule, position in the ledger and latest values; no pixel of any probe."""
        if self._session is not None:
            self._progress.elapsed = self._session.elapsed
        return self._progress.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where the checkpoint was made."""
        self._loaded = Progress.from_state(state_dict)

    @property
    def _comparison(self) -> TrainingComparison | None:
        return None if self._session is None else self._session.comparison

    # -- what the hooks do -----------------------------------------------------------

    def _ask(
        self, trainer: Trainer, pl_module: LightningModule, *, epoch: int | None
    ) -> None:
        step = trainer.global_step
        if self._session is None or not self._progress.is_new(step, epoch):
            return
        if self.should_probe(step, epoch):
            completed = trainer.current_epoch if epoch is None else epoch
            if not self._session.affords(trainer, completed):
                return
            with isolated_rng():  # loggers and figures may draw random names
                self._session.probe(trainer, pl_module, completed, step)

    def _warn_if_never_due(self, trainer: Trainer) -> None:
        """Nothing is said of a schedule of one's own, or where there is a record."""
        own = type(self).should_probe is not RecordingCallback.should_probe
        starts = self.at_start and trainer.global_step == 0
        if not (own or self._progress.position):
            name = type(self).__name__
            text = never_due(name, self.every_n_epochs, trainer, starts=starts)
            if text:
                warn(text)

    def _finish(self, trainer: Trainer) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._ended = (self._ended[0], trainer.global_step)
            with isolated_rng():
                session.finish(trainer)


class ProbeCallback(RecordingCallback):
    """Base of the callbacks that watch the same samples all through training.

    Arguments are those of :class:`leakwatch.callbacks.LeakageMonitor`.
    """

    @with_options_of(RecordingCallback)
    def __init__(
        self,
        probes: ProbeSet | int,
        scores: Sequence[str],
        *,
        noise_std: float,
        name: str,
        at_start: bool,
        prior: PriorName | GaussianPrior | None = None,
        prepare: Callable[[Tensor], Tensor] | None = None,
        target_psnr: float = 20.0,
        solver: str = "auto",
        products: int = DEFAULT_PRODUCTS,
        parameters: str | Sequence[str] | None = None,
        precision: str = "exact",
        **options: Unpack[RecordOptions],
    ) -> None:
        check_options(self, options)
        super().__init__(
            scores,
            noise_std=check_number("noise_std", noise_std, example=1e-4),
            products=products,
            name=name,
            at_start=at_start,
            **options,
        )
        if isinstance(probes, bool) or not isinstance(probes, ProbeSet | int):
            raise TypeError(
                f"probes must be a ProbeSet or how many to draw, got "
                f"{type(probes).__name__}; for instance probes=32 or "
                f"probes=ProbeSet.from_dataset(dataset)."
            )
        if isinstance(probes, int):
            check_integer("probes", probes, example=32)
        elif self.mean is not None:
            raise ValueError(
                "mean and std are for probes that the callback draws; a ProbeSet has "
                "its own: ProbeSet.from_dataset(dataset, mean=..., std=...)."
            )
        else:
            check_normalization(probes.mean, probes.std, probes.x)
        if parameters is not None:
            check_filter(parameters)
        check_prior(prior, self.prior_std)
        self.prior: PriorName | GaussianPrior | None = prior
        check_function(
            "prepare", prepare, "from a batch of inputs to what the network gets"
        )
        self.given = probes
        self.prepare = prepare
        self.target_psnr = check_number(
            "target_psnr", target_psnr, "(-inf, inf)", example=20.0
        )
        self.solver: Solver = check_solver(solver)
        check_choice("precision", precision, get_args(PrecisionName))
        self.precision = cast(PrecisionName, precision)
        self.parameters = parameters
        self._probes = probes if isinstance(probes, ProbeSet) else None

    @property
    def scoring(self) -> Scoring:
        """How samples are scored: what the arguments say about it."""
        return replace(
            super().scoring,
            prior=self.prior,
            target_psnr=self.target_psnr,
            solver=self.solver,
            precision=self.precision,
            parameters=self.parameters,
            prepare=self.prepare,
        )

    def settled(self) -> dict[str, Any]:
        """The arguments that the record of a run states."""
        stated: dict[str, Any] = {
            "at_start": self.at_start,
            "solver": self.solver,
            "precision": self.precision,
        }
        if self.parameters:
            stated["parameters"] = self.parameters
        return super().settled() | stated

    def draw(
        self,
        source: SampleSource,
        indices: Sequence[int] | None = None,
        n: int | None = None,
    ) -> ProbeSet:
        """The samples to watch.

        Args:
            source: the data of the run.
            indices: of the samples that the run watched before, if it goes on.
            n: how many to draw; ``None``: as ``probes`` says.

        Raises:
            TypeError: if there is no map-style data set to draw from.
            ValueError: if its samples can't be probed.
        """
        if isinstance(self.given, ProbeSet):
            return self.given
        return training_probes(
            source,
            caller=type(self).__name__,
            n=self.given if n is None else n,
            seed=self.seed,
            mean=self.mean,
            std=self.std,
            data_range=self.data_range,
            indices=indices,
        )

    def preparation(self, source: SampleSource, probes: ProbeSet) -> Preparation:
        """As stated, or what the run does to batches of the data set that it reads."""
        if self.prepare is not None or isinstance(self.given, ProbeSet):
            return Preparation(self.prepare)
        return source.preparation(probes)

    def comparison(
        self,
        gradients: GradientMap,
        probes: ProbeSet,
        prepared: Preparation,
        tell: Warn,
        weigh: Callable[[LossFactors], None],
    ) -> TrainingComparison:
        """What compares the first steps of training with what is scored."""
        return TrainingComparison(
            gradients,
            probes.x,
            given=self.prepare is not None,
            whole=self.criterion is training_step_losses,
            prepared=prepared,
            classes=frozenset(label for label in probes.labels if label is not None),
            tell=tell,
            weigh=weigh,
        )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks given probes as soon as the module is complete."""
        waiting = any(is_lazy(p) for p in pl_module.parameters())
        if isinstance(self.given, ProbeSet) and not waiting:
            with isolated_rng():
                checked_map(self.scoring, pl_module, self.given)


def _optional(name: str, value: Any, example: float) -> float | None:
    return None if value is None else check_number(name, value, example=example)
