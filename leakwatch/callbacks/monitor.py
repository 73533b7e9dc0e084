"""LeakageMonitor: leakage scores of fixed samples, during training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, cast

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from leakwatch.callbacks import logging as publish
from leakwatch.callbacks.data import training_probes
from leakwatch.callbacks.distributed import gather, refuse_sharded
from leakwatch.callbacks.observing import observing
from leakwatch.callbacks.recording import (
    Recorded,
    describe_run,
    new_run_name,
    open_ledger,
    pictures,
    run_directory,
)
from leakwatch.gradients import GradientMap, Path
from leakwatch.probes import ProbeSet
from leakwatch.reporting import (
    RiskLedger,
    Row,
    class_bars,
    log_scalars,
    quantities_from_metadata,
    risk_over_epochs,
    write_report,
)
from leakwatch.reporting.keys import PREFIX
from leakwatch.scores import Settings, evaluate, resolve
from leakwatch.scores.api import DEFAULT_MAX_MEMORY, check_positive
from leakwatch.scores.planner import Solver, check_solver

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_ALWAYS = ("grad_norm", "loss")
# More classes than this get keys of their own for the predicted PSNR only.
_MOST_CLASS_KEYS = 20
_HEADLINES = ("i2f_bayes_psnr", "i2f_psnr")


class _Share(TypedDict):
    """What one process found out about its part of the probes."""

    rows: list[Row]
    samples: list[int]
    labels: list[int]
    eigenvalues: np.ndarray[Any, np.dtype[np.float64]] | None
    seconds: float
    solver: str


class LeakageMonitor(Callback):
    """Scores how exposed fixed training samples are, every N epochs.

    Add it to an existing Trainer and nothing else changes: training with the monitor
    is bit-identical to training without it. Before training and at the end of each
    N-th epoch (before validation, so that checkpoints and early stopping can use its
    metrics) it differentiates each probe's gradient in the input and computes scores.
    Values go to a ledger and an HTML report in the run's directory on local disk, and
    as scalars and tables to the Trainer's loggers. Pictures stay on local disk.

    A mistake in the configuration raises before the first training step. Whatever goes
    wrong later becomes the status of the values concerned; training goes on.

    Args:
        probes: the samples to watch: a :class:`ProbeSet`, or how many to draw from the
            training data, stratified by class.
        scores: names or groups of scores: ``"lavp"``, ``"i2f"``, ``"bayes"``,
            ``"norms"``. The norm of the gradient and the loss are always recorded.
        every_n_epochs: how often; for other schedules override :meth:`should_probe`.
        at_start: also before the first training step, recorded as epoch 0.
        noise_std: standard deviation of the Gaussian noise assumed on each entry of a
            shared per-sample gradient, in gradient units.
        epsilon: damping of I²F, in units of the eigenvalues of H.
        prior_std: standard deviation of a pixel around the mean image, pixel units.
            Default: measured on the data.
        data_range: peak of the PSNR in pixel units. Default: 1 when ``mean`` and
            ``std`` are known or all inputs lie in [0, 1], else the range of the probes.
        mean: per channel, of the normalisation of the inputs. Default: from the
            datamodule, the data set or its transforms.
        std: as ``mean``.
        target_psnr: dB, for the score ``noise_std_for_psnr``.
        criterion: ``criterion(module, x, y)`` → one loss per sample. Default: accurate
            cross-entropy of ``module(x)``.
        solver: ``"auto"``, ``"exact"``, ``"lanczos"`` or ``"power"``.
        dtype: ``"float32"`` or ``"float64"``, whatever the training precision.
        max_memory: MiB for the Jacobian of one sample; above it ``"auto"`` computes
            the largest eigenvalues only.
        seed: of the drawing of probes.
        directory: of the ledger and the report. Default: ``leakwatch`` in the
            logger's directory. Never overwrites another run.
        report: write ``report.html`` when training ends, if plotly is installed.
        log_images: send the probes' pictures to remote loggers. They are private data.
        verbose: print a line after each probe step.

    Raises:
        TypeError: for arguments of the wrong kind.
        ValueError: for values out of range; unknown scores; later, in ``setup`` or at
            the start of training, for probes that the module can't take.
        RuntimeError: in ``setup``, under a strategy that shards parameters.

    Example:
        >>> from leakwatch.callbacks import LeakageMonitor
        >>> monitor = LeakageMonitor(every_n_epochs=5)
    """

    def __init__(
        self,
        probes: ProbeSet | int = 32,
        scores: Sequence[str] = ("lavp", "i2f"),
        *,
        every_n_epochs: int = 1,
        at_start: bool = True,
        noise_std: float = 1e-2,
        epsilon: float = 0.0,
        prior_std: float | None = None,
        data_range: float | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        target_psnr: float = 20.0,
        criterion: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
        solver: str = "auto",
        dtype: str = "float32",
        max_memory: int = DEFAULT_MAX_MEMORY,
        seed: int = 0,
        directory: str | None = None,
        report: bool = True,
        log_images: bool = False,
        verbose: bool = True,
    ) -> None:
        super().__init__()
        if isinstance(probes, bool) or not isinstance(probes, ProbeSet | int):
            raise TypeError(
                f"probes must be a ProbeSet or how many to draw, got "
                f"{type(probes).__name__}; for instance probes=32 or "
                f"probes=ProbeSet.from_dataset(dataset)."
            )
        if isinstance(probes, int) and probes < 1:
            raise ValueError(f"probes must be at least 1, got {probes}.")
        if isinstance(every_n_epochs, bool) or not isinstance(every_n_epochs, int):
            raise TypeError(
                f"every_n_epochs must be an integer, got {every_n_epochs!r}."
            )
        if every_n_epochs < 1:
            raise ValueError(
                f"every_n_epochs must be at least 1, got {every_n_epochs}; for "
                f"instance every_n_epochs=5. To switch the monitor off, leave it out."
            )
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be 'float32' or 'float64', got {dtype!r}.")
        if criterion is not None and not callable(criterion):
            raise TypeError(
                "criterion must be a function criterion(module, x, y) that returns one "
                f"loss per sample, got {type(criterion).__name__}."
            )
        if not (np.isfinite(epsilon) and epsilon >= 0):
            raise ValueError(f"epsilon must be finite and at least 0, got {epsilon}.")
        if (mean is None) != (std is None):
            raise ValueError("mean and std describe one normalisation; give both.")
        check_positive(
            noise_std=noise_std,
            prior_std=prior_std,
            data_range=data_range,
            max_memory=max_memory,
        )
        self.scores = resolve([*_names(scores), *_ALWAYS])
        self.solver: Solver = check_solver(solver)
        self.every_n_epochs = every_n_epochs
        self.at_start = at_start
        self.noise_std = noise_std
        self.epsilon = epsilon
        self.prior_std = prior_std
        self.data_range = data_range
        self.mean = None if mean is None else tuple(mean)
        self.std = None if std is None else tuple(std)
        self.target_psnr = target_psnr
        self.criterion = criterion
        self.dtype = dtype
        self.max_memory = max_memory
        self.seed = seed
        self.directory = directory
        self.report = report
        self.log_images = log_images
        self.verbose = verbose
        self._given = probes
        self._probes: ProbeSet | None = probes if isinstance(probes, ProbeSet) else None
        self._path: Path = "auto"
        self._run = ""
        self._ledger: RiskLedger | None = None
        self._recorded_in = ""
        self._position = 0
        self._metadata: dict[str, Any] = {}
        self._resumed: Recorded | None = None
        self._resumed_probes: tuple[list[int], str] | None = None
        self._epoch_asked = -1
        self._step_asked = -1
        self._started = 0.0
        self._spent = 0.0
        self._warned: set[str] = set()

    # -- policy --------------------------------------------------------------------

    def should_probe(self, step: int, epoch: int | None) -> bool:
        """Whether to probe now; override for another schedule.

        Asked once before training, then after each optimiser step. Must give the same
        answer in every process.

        Args:
            step: optimiser steps taken.
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
        """Where ledger and report are; ``None`` before training."""
        return self._recorded_in or None

    # -- hooks ---------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses what can't work, as early as it can be known."""
        if stage != "fit":
            return
        refuse_sharded(trainer, "LeakageMonitor")
        if self._probes is not None and any(True for _ in pl_module.parameters()):
            self._check(pl_module, self._probes)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draws the probes, opens the ledger, and probes the network as it starts."""
        self._started = time.perf_counter()
        self._warned.clear()
        self._draw(trainer)
        probes = self._known()
        self._check(pl_module, probes)
        self._open(trainer, pl_module)
        if trainer.global_step == 0 and self._epoch_asked < 0:
            self._maybe_probe(trainer, pl_module, epoch=0)

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
        if ended or trainer.global_step != self._step_asked:
            epoch = trainer.current_epoch + 1 if ended else None
            self._maybe_probe(trainer, pl_module, epoch=epoch, on_step=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Probes where an epoch ended without a last batch (``max_steps``, skips)."""
        if self._epoch_asked < trainer.current_epoch + 1:
            self._maybe_probe(trainer, pl_module, epoch=trainer.current_epoch + 1)

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
        return self._generate_state_key(
            scores=[s.name for s in self.scores], seed=self.seed, dtype=self.dtype
        )

    def state_dict(self) -> dict[str, Any]:
        """Schedule, probes and position in the ledger; no pixel of any probe."""
        probes = self._probes
        return {
            "run": self._run,
            "directory": self._recorded_in,
            "position": self._position,
            "epoch_asked": self._epoch_asked,
            "step_asked": self._step_asked,
            "indices": [] if probes is None else list(probes.index),
            "fingerprint": "" if probes is None else probes.fingerprint(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where the checkpoint was made."""
        self._epoch_asked = state_dict["epoch_asked"]
        self._step_asked = state_dict["step_asked"]
        self._resumed = Recorded(
            state_dict["run"], state_dict["directory"], state_dict["position"]
        )
        self._resumed_probes = (state_dict["indices"], state_dict["fingerprint"])

    # -- before the first step -------------------------------------------------------

    def _draw(self, trainer: Trainer) -> None:
        indices, fingerprint = self._resumed_probes or ([], "")
        if self._probes is None:
            self._probes = training_probes(
                trainer,
                n=cast(int, self._given),
                seed=self.seed,
                mean=self.mean,
                std=self.std,
                data_range=self.data_range,
                indices=indices or None,
            )
        if fingerprint and fingerprint != self._probes.fingerprint():
            self._warn(
                "probes",
                "the probes are not those that the checkpoint was recorded with; "
                "values before and after it are about different samples",
            )

    def _known(self) -> ProbeSet:
        if self._probes is None:
            raise RuntimeError("the probes are drawn when training starts")
        return self._probes

    def _check(self, pl_module: LightningModule, probes: ProbeSet) -> None:
        with observing(pl_module):
            gradients = self._gradients(pl_module)
            x, y = probes.x.to(pl_module.device), probes.y.to(pl_module.device)
            gradients.check(x, y)

    def _gradients(self, pl_module: LightningModule) -> GradientMap:
        return GradientMap(
            pl_module, self.criterion, dtype=_DTYPES[self.dtype], path=self._path
        )

    def _settings(self, probes: ProbeSet) -> Settings:
        return Settings(
            noise_std=self.noise_std,
            epsilon=self.epsilon,
            prior_std=self.prior_std or probes.prior_std,
            data_range=self.data_range or probes.data_range,
            target_psnr=self.target_psnr,
        )

    def _config(self) -> dict[str, Any]:
        return {
            "scores": [s.name for s in self.scores],
            "every_n_epochs": self.every_n_epochs,
            "at_start": self.at_start,
            "noise_std": self.noise_std,
            "epsilon": self.epsilon,
            "target_psnr": self.target_psnr,
            "solver": self.solver,
            "dtype": self.dtype,
            "seed": self.seed,
        }

    def _open(self, trainer: Trainer, pl_module: LightningModule) -> None:
        probes = self._known()
        name = self._resumed.run if self._resumed else new_run_name()
        self._run = trainer.strategy.broadcast(name)
        directory = run_directory(trainer, self.directory, self._resumed)
        self._recorded_in = str(directory)
        self._metadata = describe_run(probes, self.scores, self._config(), pl_module)
        self._metadata["prior_std"] = self._settings(probes).prior_std
        self._position = self._resumed.position if self._resumed else 0
        if not trainer.is_global_zero:
            return
        try:
            try:
                self._ledger = open_ledger(directory, self._run, self._resumed)
            except FileNotFoundError as error:
                self._warn("past", f"the record before the checkpoint is lost: {error}")
                self._ledger = RiskLedger(directory, run=self._run)
            self._ledger.write_metadata(self._metadata)
            shown = pictures(probes)
            if shown is not None:
                self._ledger.write_probes(shown, probes.index, probes.y.numpy())
            self._position = self._ledger.position
        except OSError as error:
            self._ledger = None
            self._warn("ledger", f"nothing can be recorded in {directory}: {error}")

    # -- one probe step ------------------------------------------------------------

    def _maybe_probe(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        *,
        epoch: int | None,
        on_step: bool = False,
    ) -> None:
        step = trainer.global_step
        self._step_asked = step
        if epoch is not None:
            if epoch <= self._epoch_asked:
                return
            self._epoch_asked = epoch
        if not self.should_probe(step, epoch):
            return
        completed = trainer.current_epoch if epoch is None else epoch
        share = self._score_share(trainer, pl_module, completed, step)
        shares = gather(trainer, share)
        try:
            scalars = self._record(trainer, shares, completed, step)
        except Exception as error:
            self._warn("record", f"recording failed: {type(error).__name__}: {error}")
            return
        if epoch != 0:
            for key, value in scalars.items():
                if not key.startswith(f"{PREFIX}/class/"):
                    pl_module.log(
                        key, value, on_step=on_step, on_epoch=not on_step, logger=False
                    )

    def _score_share(
        self, trainer: Trainer, pl_module: LightningModule, epoch: int, step: int
    ) -> _Share:
        """Scores this process's part of the probes; never raises."""
        started = time.perf_counter()
        everything = self._known()
        rank, size = trainer.global_rank, trainer.world_size
        picked = range(rank, len(everything), size)
        samples = [everything.index[i] for i in picked]
        labels = [int(everything.y[i]) for i in picked]
        rows: list[Row] = []
        eigenvalues, solver = None, self.solver
        if samples:
            try:
                part = everything.split(rank, size)
                with observing(pl_module):
                    gradients = self._gradients(pl_module)
                    result = evaluate(
                        gradients,
                        part.x.to(pl_module.device),
                        part.y.to(pl_module.device),
                        self.scores,
                        self._settings(everything),
                        solver=self.solver,
                        max_memory=self.max_memory,
                        input_scale=part.input_scale(),
                    )
                self._path = gradients.path
                solver = cast(Solver, result.solver)
                if result.eigenvalues is not None:
                    eigenvalues = result.eigenvalues.numpy()
                for i, (sample, label) in enumerate(zip(samples, labels, strict=True)):
                    for name in result:
                        value, status = float(result[name][i]), result.status[name][i]
                        rows.append(
                            Row(epoch, step, sample, label, name, value, str(status))
                        )
            except Exception as error:
                why = f"failed: {type(error).__name__}: {error}"
                self._warn("probe", f"a probe step failed: {why}")
                rows = [
                    Row(epoch, step, sample, label, s.name, float("nan"), why)
                    for sample, label in zip(samples, labels, strict=True)
                    for s in self.scores
                ]
        return _Share(
            rows=rows,
            samples=samples,
            labels=labels,
            eigenvalues=eigenvalues,
            seconds=time.perf_counter() - started,
            solver=solver,
        )

    def _record(
        self, trainer: Trainer, shares: list[_Share], epoch: int, step: int
    ) -> dict[str, float]:
        """Ledger and loggers in the main process; the scalars in all of them."""
        order = {sample: i for i, sample in enumerate(self._known().index)}
        rows = [row for share in shares for row in share["rows"]]
        rows.sort(key=lambda row: order[cast(int, row.sample)])
        seconds = max(share["seconds"] for share in shares)
        self._spent += seconds
        fraction = self._spent / max(time.perf_counter() - self._started, 1e-9)
        rows.append(Row(epoch, step, None, None, "seconds", seconds))
        rows.append(Row(epoch, step, None, None, "time_fraction", fraction))
        spectra = _merge_spectra(shares, order, epoch, step)
        names = self._known().class_names
        classes = set(self._known().y.tolist())
        scalars = log_scalars(
            rows,
            quantities_from_metadata(self._metadata),
            names,
            per_class=_HEADLINES if len(classes) > _MOST_CLASS_KEYS else None,
        )
        self._position += 1
        if not trainer.is_global_zero:
            return scalars
        if self._ledger is not None:
            try:
                self._position = self._ledger.append(rows, spectra)
                solver = {"solver_used": shares[0]["solver"]}
                if self._metadata.get("solver_used") != solver["solver_used"]:
                    self._metadata |= solver
                    self._ledger.write_metadata(self._metadata)
            except OSError as error:
                self._warn("ledger", f"a probe step was not recorded: {error}")
        try:
            publish.publish_scalars(trainer, scalars, step=step, epoch=epoch)
            publish.publish_step(
                trainer,
                rows,
                None if spectra is None else spectra["eigenvalues"],
                step=step,
                epoch=epoch,
                class_names=names,
            )
            if self.log_images and self._position == 1:
                self._send_pictures(trainer, step, epoch)
        except Exception as error:
            self._warn("loggers", f"a logger refused a probe step: {error}")
        if self.verbose:
            self._say(trainer, _summary(scalars, epoch, step, seconds))
        return scalars

    def _send_pictures(self, trainer: Trainer, step: int, epoch: int) -> None:
        probes = self._known()
        shown = pictures(probes)
        if shown is not None:
            captions = [
                f"sample {index}, class {probes.class_of(i)}"
                for i, index in enumerate(probes.index)
            ]
            publish.publish_pictures(trainer, shown, captions, step=step, epoch=epoch)

    # -- afterwards ----------------------------------------------------------------

    def _finish(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero or self._ledger is None:
            return
        ledger, self._ledger = self._ledger, None
        try:
            rows = ledger.rows()
            if any(publish.has_figures(logger) for logger in trainer.loggers) and rows:
                quantities = quantities_from_metadata(self._metadata)
                names = self._known().class_names
                figures = {
                    "risk": risk_over_epochs(rows, quantities, names),
                    "classes": class_bars(rows, quantities, names),
                }
                publish.publish_figures(
                    trainer, figures, step=rows[-1].step, epoch=rows[-1].epoch
                )
            if self.report and rows:
                path = write_report(ledger.directory)
                self._say(trainer, f"leakwatch report: {path}")
        except ModuleNotFoundError as error:
            rank_zero_info(f"leakwatch recorded {ledger.directory}; no report: {error}")
        except Exception as error:
            self._warn("report", f"the report was not written: {error}")

    def _say(self, trainer: Trainer, text: str) -> None:
        bar = trainer.progress_bar_callback
        if bar is not None and bar.is_enabled:
            bar.print(text)
        else:
            rank_zero_info(text)

    def _warn(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            rank_zero_warn(f"leakwatch: {text}")


def _names(scores: Sequence[str] | str) -> list[str]:
    return [scores] if isinstance(scores, str) else list(scores)


def _merge_spectra(
    shares: list[_Share], order: dict[int, int], epoch: int, step: int
) -> dict[str, Any] | None:
    kept = [share for share in shares if share["eigenvalues"] is not None]
    if not kept:
        return None
    samples = [sample for share in kept for sample in share["samples"]]
    labels = [label for share in kept for label in share["labels"]]
    values = np.concatenate([cast(Any, share["eigenvalues"]) for share in kept])
    rows = sorted(range(len(samples)), key=lambda i: order[samples[i]])
    return {
        "eigenvalues": values[rows],
        "sample": np.array(samples)[rows],
        "class": np.array(labels)[rows],
        "epoch": epoch,
        "step": step,
    }


def _summary(
    scalars: dict[str, float], epoch: int, step: int, seconds: float
) -> str:
    for name in _HEADLINES:
        median = scalars.get(f"{PREFIX}/{name}/median", float("nan"))
        worst = scalars.get(f"{PREFIX}/{name}/worst", float("nan"))
        if np.isfinite(median):
            return (
                f"leakwatch epoch {epoch} (step {step}): predicted PSNR of an attack "
                f"{median:.1f} dB median, {worst:.1f} dB worst sample; "
                f"{seconds:.1f} s"
            )
    return f"leakwatch epoch {epoch} (step {step}): probed in {seconds:.1f} s"
