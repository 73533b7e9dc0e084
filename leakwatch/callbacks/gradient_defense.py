"""GradientDefense: training with what a client would share instead of its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import torch
from jaxtyping import Float
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from leakwatch.callbacks._defense.basis_cache import BasisMemory, memory_for
from leakwatch.callbacks._defense.fit import DefendedFit
from leakwatch.callbacks._defense.refusals import refuse_optimizers, refuse_run
from leakwatch.callbacks._defense.samples import SampleDefense
from leakwatch.callbacks._defense.step import DefenseSummary, Tally
from leakwatch.callbacks._probing.placed import Placed
from leakwatch.checks import (
    check_choice,
    check_criterion,
    check_dtype,
    check_integer,
    check_name,
    check_number,
)
from leakwatch.defenses import Defense, Needs, Reduction, perturbation
from leakwatch.defenses.base import averaging
from leakwatch.defenses.privacy import Accountant, PrivacyLoss, privacy_loss
from leakwatch.derivatives import GradientMap
from leakwatch.status import OK, Status

__all__ = ["GradientDefense"]

# Far from every seed of training that somebody would choose; the CPU's generator takes
# seeds modulo 2**32.
_AUDIT_SEED = 2**31


class GradientDefense(Placed):
    """Applies a defense to what the optimiser consumes, and measures what arrived.

    Every step of an optimiser is one message: the gradient that it would consume,
    accumulated, averaged over processes, unscaled and clipped, becomes what the defense
    shares of it, and nothing of the Trainer's comes after. In automatic optimisation
    that is right behind ``configure_gradient_clipping``, in manual optimisation in
    ``on_before_optimizer_step``, so clip before ``optimizer.step()``.

    *Defenses of gradients* (`GaussianNoise`, `GradientPruning`) act on that vector. It
    works with accumulation, clipping, mixed precision, several optimisers, and with
    DDP, where every process draws the same noise.

    *Defenses that look at samples* (`EigenNoise`, `MixUp`, `DPSGD`) get the samples of
    all micro-batches since the last step, their gradients evaluated as
    :class:`leakwatch.GradientMap` does, in inference mode, and combined as the loss
    combines them. `EigenNoise` adds its noise to the gradient of training, and its
    relative budget is relative to the gradient consumed, clipped, though its shape is
    that of the samples (a defense of your own gets the same if its ``needs`` are
    ``"jacobian"`` and it is a dataclass with a ``budget``); what the others make takes
    that gradient's place, since it would give away what they hide. If the combined
    gradient is another than that of training (BatchNorm, dropout, another loss), there
    is a warning, and for `DPSGD` an error at the first step. They need automatic
    optimisation, one optimiser, one process, and batches ``(x, y)``.

    Whatever can't be right is refused before training; a defense that fails, or a step
    that went past it, stops training: parameters are compared before and after each
    batch and step, so updates by hand, of all parameters or some, are seen as well.
    Global random streams are left alone. State is part of checkpoints: resumed equals
    uninterrupted. While training runs, the module has an attribute
    ``configure_gradient_clipping`` of its own and can't be pickled.

    *A basis refreshed every N steps.* `EigenNoise` decomposes the Jacobian of every
    sample in every step. With ``refresh_every=N`` a sample's (u_i, σ_i) of step s serve
    until step s + N − 1 whenever the same sample comes back, found by a hash of the
    bytes of x and y: with random augmentation none ever does, and there is a warning if
    no basis was used again by the end of the second epoch. The allocation then spreads
    the budget by the σ_i kept, and the noise is Σ c_i J u_i/σ_i with J of now, scaled
    for each sample to ‖c‖, its length under a basis of now. So √E‖δ‖² is exactly what
    is stated, at two products with J; what is not of now is where it goes: the J u_i
    are no longer orthogonal, and σ_i no longer their lengths. The image of
    ``"input_space"`` moves along the u_i kept until the gradient of now has moved by
    the budget. An allocation of your own must draw by ``samples.basis.push`` or
    `InRange`.

    Bases that may serve again are part of checkpoints, for no other way would a resumed
    run draw the noise of an uninterrupted one. That is up to ``basis_memory`` a file,
    computed from private samples: keep it as private as these. None are for N = 1.

    After each step, for as often as the Trainer logs: ``{name}/asked_norm``, the
    √E‖δ‖² stated; ``{name}/applied_norm``, ‖δ‖ of the gradient consumed less the clean
    one; ``{name}/applied_std``, of the random part over entries;
    ``{name}/relative_norm``, ‖δ‖/‖g‖; ``{name}/seconds``; for noise along singular
    directions also ``{name}/bases_formed``, ``{name}/bases_reused`` and
    ``{name}/basis_seconds``, spent on the former. With several optimisers
    ``{name}/0/…``, ``{name}/1/…``. There is a warning when δ is not what was drawn
    (another callback changed it, half precision rounded it away) or its mean size not
    what was asked, by more than 5 %.

    With ``delta`` the ε of differential privacy is logged as ``{name}/epsilon`` at the
    end of every epoch, where one can be stated; see :attr:`privacy`.

    Args:
        defense: see :mod:`leakwatch.defenses`. Its budget is that of a message.
        reduction: how the training loss combines the samples of a micro-batch,
            ``"mean"`` or ``"sum"``; for defenses that look at samples.
        criterion: one loss per sample, as for :class:`leakwatch.GradientMap`; for
            defenses that look at samples.
        dtype: of their gradients, ``"float32"`` or ``"float64"``.
        seed: of the noise.
        refresh_every: steps that the directions of a sample are used for; 1: those of
            every step are formed anew. For defenses along singular directions.
        basis_memory: MiB of bases that may be kept, 8 d_x² bytes each (4.7 MiB for
            28×28, 72 MiB for 3×32×32), the least recently used going first. Room for
            fewer than the samples of an epoch is used in vain if these come in order.
        delta: δ at which ε is stated, well below one over the number of samples;
            ``None``: no ε is. Needs Opacus (the extra ``dp``).
        accountant: of ε, ``"prv"`` or ``"rdp"``.
        name: first part of all log keys.

    Raises:
        TypeError: for arguments of the wrong kind.
        ValueError: for values out of range.
        RuntimeError: in ``fit``, for what can't be defended, and when a defense fails.

    Example:
        >>> from leakwatch.callbacks import GradientDefense
        >>> from leakwatch.defenses import Budget, GaussianNoise
        >>> defense = GradientDefense(GaussianNoise(Budget(0.01, "std")))
        >>> defense.summary.steps
        0
    """

    def __init__(
        self,
        defense: Defense,
        *,
        reduction: Reduction = "mean",
        criterion: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
        dtype: str | torch.dtype = "float32",
        seed: int = 0,
        refresh_every: int = 1,
        basis_memory: float = 1024.0,
        delta: float | None = None,
        accountant: Accountant = "prv",
        name: str = "defense",
    ) -> None:
        super().__init__()
        averaging(1, reduction)
        check_criterion(criterion)
        self.defense = _checked(defense)
        self.reduction: Reduction = reduction
        self.criterion = criterion
        self.dtype = str(check_dtype(dtype)).removeprefix("torch.")
        self.seed = check_integer("seed", seed, smallest=0)
        self._memory = memory_for(self.defense, refresh_every, basis_memory)
        self.refresh_every, self.basis_memory = refresh_every, basis_memory
        if delta is not None:
            delta = check_number("delta", delta, "(0, 1)", example=1e-5)
        check_choice("accountant", accountant, get_args(Accountant))
        self.delta, self.accountant = delta, accountant
        self.name = check_name("name", name)
        # Of the data in a step, and by how much one sample can change the gradient.
        self._rate, self._sensitivity = math.nan, math.nan
        self._poisson = self._told = False
        self._tally = Tally()
        self._streams: dict[str, torch.Generator] = {}
        self._loaded: dict[str, Any] | None = None
        self._fit: DefendedFit | None = None
        self._sizes: dict[str, int] = {}

    # -- for users -----------------------------------------------------------------

    @property
    def summary(self) -> DefenseSummary:
        """What was asked and applied, over all steps and optimisers so far."""
        return self._tally.summary

    @property
    def privacy(self) -> PrivacyLoss | None:
        """ε of all steps so far; ``None`` without ``delta`` and before the first step.

        Of :class:`leakwatch.defenses.DPSGD` as if batches were drawn independently
        (Poisson), as all the literature states it; the status says if the loader
        shuffles instead. Of Gaussian noise where the Trainer clips gradients by norm:
        a sample is in one step of an epoch and changes its gradient by 2C at most.
        """
        steps = self._tally.steps
        if self.delta is None or not steps:
            return None
        if not 0 < self._rate <= 1:
            why = "it is not known which share of the data a step takes"
            status = Status("undefined", why)
            return PrivacyLoss(math.nan, self.delta, self.accountant, status)
        clipped = math.isfinite(self._sensitivity)
        per_sample = self.defense.needs == "sample gradients"
        found = privacy_loss(
            self.defense,
            steps=steps,
            sample_rate=self._rate,
            delta=self.delta,
            accountant=self.accountant,
            sampling="poisson" if per_sample else "epochs",
            sensitivity=self._sensitivity if clipped else None,
        )
        if found.status == OK and per_sample and not self._poisson:
            why = "as if batches were drawn independently, but the loader shuffles"
            found = replace(found, status=Status("estimated", why))
        return found

    @property
    def perturb(
        self,
    ) -> Callable[[Float[Tensor, "n d_theta"]], Float[Tensor, "n d_theta"]]:
        """The defense as ``InversionAudit(perturb=...)``: each row a message.

        What a client with a single sample would share, drawn from a stream of its own,
        so that audits don't change training.

        Raises:
            TypeError: for a defense that looks at samples, which audits don't pass on.
        """
        defense = self.defense
        if defense.needs not in ("gradient", "sample gradients"):
            raise TypeError(
                f"{defense.name} looks at the samples behind gradients, which an audit "
                f"doesn't pass on; attack them with leakwatch.attack(..., perturb="
                f"leakwatch.defenses.perturbation(defense, generator, samples))."
            )

        def perturb(gradient: Tensor) -> Tensor:
            layered = defense.with_layers(self._sizes)
            return perturbation(layered, self._stream("audit"))(gradient)

        perturb.__name__ = defense.name
        return perturb

    def arguments(self) -> dict[str, Any]:
        """All that changes what is shared, for the record of a run."""
        names = (
            "defense", "reduction", "criterion", "dtype", "seed", "refresh_every",
            "basis_memory", "delta", "accountant",
        )  # fmt: skip
        return {"class": type(self), **{name: getattr(self, name) for name in names}}

    # -- before training -------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses what can't be defended, as early as it can be known."""
        # Evaluation with a checkpoint loads callback states too: only this fit counts.
        self._loaded = None
        if stage != "fit":
            return
        callbacks: list[Callback] = getattr(trainer, "callbacks", [])
        if any(isinstance(c, GradientDefense) and c is not self for c in callbacks):
            raise RuntimeError(
                "there are two GradientDefense callbacks, and neither could tell what "
                "it did; combine them in one object with the methods of "
                "leakwatch.defenses.Defense."
            )
        super().setup(trainer, pl_module, stage)
        refuse_run(trainer, pl_module, self.defense)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuses optimisers that can't be defended."""
        refuse_optimizers(trainer, pl_module, self.defense)
        if not any(is_lazy(p) for p in pl_module.parameters()):
            self._sizes = {
                name: p.numel()
                for name, p in pl_module.named_parameters()
                if p.requires_grad
            }

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins, or goes on where a checkpoint was made."""
        if self._loaded is not None:
            self._restore(self._loaded, pl_module.device)
        elif trainer.global_step == 0:
            self._tally, self._streams = Tally(), {}
            self._memory = self._new_memory()
        self._loaded = None
        self._note_sampling(trainer)
        samples = None
        if self.defense.needs != "gradient":
            gradients = GradientMap(
                pl_module, self.criterion, dtype=check_dtype(self.dtype)
            )
            samples = SampleDefense(
                self.defense, gradients, pl_module, self.reduction, self._memory
            )
        self._remove()
        self._fit = DefendedFit(
            trainer,
            pl_module,
            self.defense,
            samples,
            self._stream("training", pl_module.device),
            self._tally,
            self.name,
        )

    # -- during training -------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keeps the samples for defenses that look at them."""
        if self._fit is None:
            return
        self._fit.batch_started(first=batch_idx == 0)
        if self._fit.samples is not None:
            self._fit.samples.arrived(batch)

    def on_before_zero_grad(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Gradients that are set to zero take their samples with them."""
        if self._fit is not None and self._fit.samples is not None:
            self._fit.samples.cleared()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts a micro-batch once its gradient is there."""
        if self._fit is not None and self._fit.samples is not None:
            self._fit.samples.counted()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Defends in manual optimisation, where nothing clips after this."""
        if self._fit is not None and not pl_module.automatic_optimization:
            self._fit.defend(optimizer)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Stops after a step past the defense; logs what the others consumed."""
        if self._fit is None:
            return
        self._fit.batch_ended()
        if trainer.barebones:
            return
        values = self._fit.values()
        # Lightning would send them to the device one by one.
        sent = torch.tensor(list(values.values()), device=pl_module.device)
        for key, value in zip(values, sent, strict=True):
            pl_module.log(
                f"{self.name}/{key}", value, on_step=True, on_epoch=False, batch_size=1
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warns if bases are kept that never serve again; logs ε."""
        if self._fit is None:
            return
        self._fit.epoch_ended()
        spent = self.privacy
        if spent is None or trainer.barebones:
            return
        if spent.status.usable:
            pl_module.log(f"{self.name}/epsilon", spent.epsilon, on_epoch=True)
        elif not self._told:
            self._told = True
            rank_zero_warn(f"leakwatch {self.name}: no ε is logged: {spent.status}")

    # -- afterwards ------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gives the module and its optimisers back."""
        self._remove()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Gives the module and its optimisers back."""
        self._remove()

    def teardown(
        self, trainer: Trainer, pl_module: LightningModule, stage: str
    ) -> None:
        """Gives the module and its optimisers back."""
        self._remove()

    # -- state -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Random streams, what was measured, and bases that may serve again."""
        streams = {
            name: {"device": stream.device.type, "state": stream.get_state()}
            for name, stream in self._streams.items()
        }
        bases = None if self._memory is None else self._memory.state()
        return {"streams": streams, "tally": self._tally.state(), "bases": bases}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where the checkpoint was made."""
        self._loaded = state_dict

    def _note_sampling(self, trainer: Trainer) -> None:
        """What ε follows from, beside the defense."""
        batches = float(trainer.num_training_batches)
        share = trainer.accumulate_grad_batches / batches if batches else math.nan
        self._rate = min(1.0, share)
        norm = trainer.gradient_clip_algorithm in (None, "norm")
        clip = trainer.gradient_clip_val if norm else None
        self._sensitivity = 2 * float(clip) if clip else math.nan
        sampler = getattr(trainer.train_dataloader, "batch_sampler", None)
        # Of Opacus: each batch takes every sample with the same probability.
        self._poisson = type(sampler).__name__ == "UniformWithReplacementSampler"
        self._told = False

    def _remove(self) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.close()

    def _restore(self, state: dict[str, Any], device: torch.device) -> None:
        self._tally = Tally(**state["tally"])
        self._streams = {}
        self._memory = self._new_memory()
        if self._memory is not None and state.get("bases") is not None:
            self._memory.restore(state["bases"], device)
        for name, stream in state["streams"].items():
            generator = self._stream(name, device if name == "training" else None)
            if generator.device.type == stream["device"]:
                generator.set_state(stream["state"])
                continue
            # Noise that was drawn before must not be drawn again.
            generator.manual_seed(self.seed + self._tally.steps)
            rank_zero_warn(
                f"leakwatch {self.name}: the checkpoint's noise was drawn on "
                f"{stream['device']} and is now drawn on {generator.device.type}; "
                f"the run goes on with other noise than it would have had."
            )

    def _new_memory(self) -> BasisMemory | None:
        return memory_for(self.defense, self.refresh_every, self.basis_memory)

    def _stream(self, name: str, device: torch.device | None = None) -> torch.Generator:
        if name not in self._streams:
            place = device if device is not None and device.type == "cuda" else "cpu"
            generator = torch.Generator(device=place)
            generator.manual_seed(self.seed + (_AUDIT_SEED if name == "audit" else 0))
            self._streams[name] = generator
        return self._streams[name]


def _checked(defense: object) -> Defense:
    if not isinstance(defense, Defense):
        raise TypeError(
            f"defense must be a leakwatch.defenses.Defense, got {defense!r}; for "
            f"instance GaussianNoise(Budget(0.01, 'std'))."
        )
    check_choice("defense.needs", defense.needs, get_args(Needs))
    return defense
