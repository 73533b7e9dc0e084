"""What a defense does from the start of training to its end: every step, measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from jaxtyping import Float
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from leakwatch.callbacks._defense.parameter_watch import ParameterWatch
from leakwatch.callbacks._defense.refusals import scaler_of
from leakwatch.callbacks._defense.samples import SampleDefense
from leakwatch.callbacks._defense.step import (
    Draw,
    StepMeasurement,
    Tally,
    consumed,
    finite,
    noised,
    write,
)
from leakwatch.callbacks._probing.distributed import gather
from leakwatch.defenses import Defense
from leakwatch.derivatives.runtime.clock import finished
from leakwatch.derivatives.runtime.rng_and_precision import isolated_rng

__all__ = ["DefendedFit"]

_HOOK = "configure_gradient_clipping"
# How far what was consumed may be from what was drawn.
_OFF = 0.05
# How far the gradient of training may be from the combined gradients of its samples.
_GAP, _GAP_HALF = 0.01, 0.05
_COMPARE_EVERY = 50


@final
class DefendedFit:
    """Stands between the gradients of a run and its optimisers, until it is closed.

    Args:
        trainer: with its optimisers.
        module: what is trained.
        defense: the defense.
        samples: what it knows of samples; ``None`` if it needs gradients only.
        generator: random stream.
        tally: of what was measured; kept up to date.
        name: for warnings.

    Attributes:
        samples: as given.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        defense: Defense,
        samples: SampleDefense | None,
        generator: torch.Generator,
        tally: Tally,
        name: str,
    ) -> None:
        self.samples = samples
        self._trainer = trainer
        self._module = module
        self._defense = defense
        self._generator = generator
        self._tally = tally
        self._name = name
        self._pending: dict[int, tuple[Draw, float]] = {}
        self._latest: dict[int, dict[str, float]] = {}
        self._taken: dict[int, list[tuple[int, int]]] = {}
        self._warned: set[str] = set()
        self._watch: ParameterWatch | None = None
        self._own = vars(module).get(_HOOK)
        self._handles = [
            optimizer.register_step_post_hook(self._stepped)
            for optimizer in trainer.optimizers
        ]
        if module.automatic_optimization:
            vars(module)[_HOOK] = self._clipping(module.configure_gradient_clipping)

    def close(self) -> None:
        """Gives the module and its optimisers back."""
        for handle in self._handles:
            handle.remove()
        if self._own is not None:
            vars(self._module)[_HOOK] = self._own
        else:
            vars(self._module).pop(_HOOK, None)

    def batch_started(self, first: bool) -> None:
        """Looks for steps past the defense since the batch before.

        Args:
            first: whether it is the first batch of an epoch, before which parameters
                may be changed: averaged, pruned, frozen.

        Raises:
            RuntimeError: if parameters have changed.
        """
        if first or self._watch is None:
            self._watch = ParameterWatch(self._module)
        else:
            self._watch.check()

    def batch_ended(self) -> None:
        """Looks for steps past the defense in the batch.

        Raises:
            RuntimeError: if parameters have changed otherwise than by defended steps.
        """
        if self._watch is not None:
            self._watch.check()

    def values(self) -> dict[str, float]:
        """What to log about the steps since it was asked last, without the name."""
        latest, self._latest = self._latest, {}
        several = len(self._trainer.optimizers) > 1
        return {
            f"{i}/{key}" if several else key: value
            for i, optimizer in enumerate(self._trainer.optimizers)
            for key, value in latest.get(id(optimizer), {}).items()
        }

    def defend(
        self, optimizer: Optimizer, before: Float[Tensor, " d_theta"] | None = None
    ) -> None:
        """Puts what is shared in place of the gradient of the next step.

        Args:
            optimizer: whose step it is.
            before: its gradient before clipping, for defenses that look at samples.

        Raises:
            RuntimeError: if it can't be defended.
        """
        if self._watch is not None:
            self._watch.check()
        if self._pending.pop(id(optimizer), None) is not None:
            self._tally.skipped += 1
        parameters = consumed(optimizer)
        if not parameters:
            return
        device = parameters[0].device
        started = finished(device)
        if not finite(parameters):
            self._not_finite()
            return
        with isolated_rng(), torch.no_grad():
            if self.samples is None or before is None:
                drawn = noised(self._defense, parameters, self._generator)
            else:
                drawn = self.samples.draw(
                    optimizer,
                    before,
                    self._trainer.accumulate_grad_batches,
                    self._generator,
                )
                self.samples.cleared()
                self._check_gap(self.samples.gap)
            write(drawn.parameters, drawn.clean + drawn.delta)
        self._compare_processes(drawn)
        self._pending[id(optimizer)] = drawn, finished(device) - started

    def epoch_ended(self) -> None:
        """Says once if keeping bases has been for nothing."""
        memory = None if self.samples is None else self.samples.memory
        why = None if memory is None else memory.epoch_ended()
        if why is not None:
            self._warn("bases", f"no basis was used again in two epochs: {why}")

    def _clipping(self, original: Callable[..., None]) -> Callable[..., None]:
        # A plain function: copies of the module, as of averaged weights, share it
        # instead of copying everything here.
        def clip_then_defend(optimizer: Optimizer, *args: Any, **keywords: Any) -> None:
            before = None
            usable = self.samples is not None and finite(consumed(optimizer))
            if self.samples is not None and usable and consumed(optimizer):
                before = self.samples.gradient(optimizer)
            original(optimizer, *args, **keywords)
            self.defend(optimizer, before)

        return clip_then_defend

    def _not_finite(self) -> None:
        if self.samples is not None:
            self.samples.cleared()
        if scaler_of(self._trainer) is None:
            raise RuntimeError(
                f"the gradient of step {self._trainer.global_step} is not finite and "
                f"can't be defended; training has diverged (lower the learning rate, "
                f"or clip gradients), or skip such batches by returning None."
            )
        self._tally.skipped += 1  # the scaler skips this step

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        drawn, seconds = self._pending.pop(id(optimizer), (None, 0.0))
        if drawn is None:
            # A class that calls its parent's step() reports one step twice.
            if consumed(optimizer) and _stamp(optimizer) != self._taken.get(
                id(optimizer)
            ):
                raise RuntimeError(
                    f"{type(optimizer).__name__} took a step with a gradient that was "
                    f"not defended; take steps through the optimizers that "
                    f"self.optimizers() returns, one for each backward pass."
                )
            return
        self._taken[id(optimizer)] = _stamp(optimizer)
        if self._watch is not None:
            held = (p for group in optimizer.param_groups for p in group["params"])
            self._watch.stepped(held)
        device = drawn.clean.device
        started = finished(device)
        step = StepMeasurement.of(drawn)
        seconds += finished(device) - started
        self._tally.add(step, seconds, drawn.bases)
        values = step.values(seconds)
        if drawn.bases is not None:
            values |= drawn.bases.values()
        self._latest[id(optimizer)] = values
        if not step.mismatch <= _OFF:
            self._warn(
                "mismatch",
                f"the optimiser consumed a gradient that differs from what was drawn "
                f"by {step.mismatch:.1%} of the perturbation; a hook or callback "
                f"changed it afterwards, or its precision can't hold the perturbation",
            )
        off = self._tally.off
        if off is not None:
            self._warn(
                "size",
                f"over {self._tally.steps} steps the noise has {off:.1%} of the size "
                f"asked for; its budget does not say what is shared",
            )

    def _check_gap(self, gap: float) -> None:
        full = str(self._trainer.precision).startswith(("32", "64"))
        if gap <= (_GAP if full else _GAP_HALF):
            return
        text = (
            f"the gradient that training computes differs by {gap:.1%} from the "
            f"combined gradients of its samples, each alone in inference mode "
            f"(BatchNorm, dropout, a loss that combines samples in another way than "
            f"reduction=, or another loss than criterion=)"
        )
        if self._defense.needs == "sample gradients" and self._tally.steps == 0:
            raise RuntimeError(
                f"{text}; {self._defense.name} would bound the influence of no sample "
                f"on what is trained. Use GroupNorm and no dropout, and state the loss "
                f"that training uses."
            )
        if self._defense.needs == "jacobian":
            text += (
                f"; the noise of {self._defense.name} has the size asked for beside "
                f"the gradient consumed, but its shape is that of the samples"
            )
        self._warn("gap", text)

    def _compare_processes(self, drawn: Draw) -> None:
        if self._trainer.world_size == 1 or self._tally.steps % _COMPARE_EVERY:
            return
        message = drawn.clean + drawn.delta
        mine = float(message.sum()), float(message.norm())
        if len(set(gather(self._trainer, mine))) > 1:
            raise RuntimeError(
                "processes would consume different gradients; gradients must be "
                "averaged over processes before the step (no no_sync() around it), and "
                "seed must be the same everywhere."
            )

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            rank_zero_warn(f"leakwatch {self._name}: {text}.")


def _stamp(optimizer: Optimizer) -> list[tuple[int, int]]:
    """Changes whenever a gradient does."""
    grads = [p.grad for p in consumed(optimizer) if p.grad is not None]
    return [(id(g), g._version) for g in grads]
