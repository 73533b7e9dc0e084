"""Defenses that look at the samples of a step, and the message these make up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from jaxtyping import Float
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from leakwatch.callbacks._defense.basis_cache import BasisMemory
from leakwatch.callbacks._defense.step import Draw, consumed, flat
from leakwatch.callbacks._probing.observing import observing
from leakwatch.defenses import Budget, Defense, Reduction, Samples
from leakwatch.defenses.base import averaging
from leakwatch.derivatives import GradientMap

__all__ = [
    "SampleDefense",
    "clip_factor",
    "combination",
    "relative_to",
]


@final
class SampleDefense:
    """Keeps the samples behind the next step, and protects them when it comes.

    Args:
        defense: ``needs`` is anything but ``"gradient"``.
        gradients: the map from samples to gradients.
        module: what is trained.
        reduction: how the training loss combines samples.
        memory: of directions from earlier steps; ``None`` for a defense without.

    Attributes:
        memory: as given.
        gap: ‖gradient of training − combined gradients of samples‖ over the former, at
            the last step.

    Raises:
        ValueError: if the gradient map shares what the module doesn't hold.
    """

    def __init__(
        self,
        defense: Defense,
        gradients: GradientMap,
        module: LightningModule,
        reduction: Reduction,
        memory: BasisMemory | None = None,
    ) -> None:
        self.memory = memory
        self._defense = defense
        self._gradients = gradients
        self._module = module
        self._reduction = reduction
        self._candidate: tuple[Tensor, Tensor] | None = None
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._checked = False
        self.gap = 0.0
        _ = self._parameters()

    def arrived(self, batch: Any) -> None:
        """A micro-batch is about to be trained on.

        Args:
            batch: as training gets it.

        Raises:
            TypeError: if it isn't a pair of tensors, or as ``GradientMap.check``.
            ValueError: as ``GradientMap.check``.
        """
        pair = isinstance(batch, Sequence) and len(batch) == 2
        if not pair or not all(isinstance(part, Tensor) for part in batch):
            raise TypeError(
                f"GradientDefense({self._defense.name!r}) looks at samples and needs "
                f"batches (x, y) of two tensors, got {_described(batch)}; change what "
                f"the loader gives, or use a defense of gradients such as "
                f"GaussianNoise."
            )
        x, y = batch
        if not self._checked:
            with observing(self._module):
                self._gradients.check(x[:2], y[:2])
            self._checked = True
        self._candidate = (x.detach(), y.detach())

    def counted(self) -> None:
        """Its gradient has been added to those of the step."""
        if self._candidate is not None:
            self._kept.append(self._candidate)
            self._candidate = None

    def cleared(self) -> None:
        """Gradients were set to zero, or consumed."""
        self._kept.clear()

    def draw(
        self,
        optimizer: Optimizer,
        before: Float[Tensor, " d_theta"],
        accumulated: int,
        generator: torch.Generator,
    ) -> Draw:
        """What the step is to consume.

        Args:
            optimizer: whose gradients are clipped by now.
            before: those of :meth:`gradient`, before they were clipped.
            accumulated: what the loss of each micro-batch was divided by.
            generator: random stream.

        Raises:
            RuntimeError: if the gradient is not that of the samples that were seen.
        """
        parameters = self._parameters(optimizer)
        after = flat(parameters)
        factor = clip_factor(before, after)
        if self._defense.needs == "sample gradients" and abs(factor - 1) > 1e-6:
            raise RuntimeError(
                f"the gradient was clipped (to {factor:.3g} of itself) although "
                f"{self._defense.name} clips that of each sample; leave "
                f"configure_gradient_clipping alone."
            )
        if self.memory is not None:
            self.memory.advance()
        samples, share = self._samples(accumulated)
        with observing(self._module):
            combined = share.to(samples.gradient) @ samples.gradient
            gap = float((combined.double() - before).norm())
            norm = float(before.norm())
            self.gap = gap / norm if norm > 0 else float(gap > 0)
            return self._drawn(samples, share * factor, parameters, after, generator)

    def gradient(self, optimizer: Optimizer) -> Float[Tensor, " d_theta"]:
        """The gradient as it is now, in the order of the gradient map.

        Args:
            optimizer: which must hold every parameter that the map shares.
        """
        return flat(self._parameters(optimizer))

    def _drawn(
        self,
        samples: Samples,
        share: Tensor,
        parameters: Sequence[nn.Parameter],
        after: Tensor,
        generator: torch.Generator,
    ) -> Draw:
        # What is shaped by samples is as large as asked beside the gradient consumed.
        defense = relative_to(self._defense, float(after.norm()))
        message, clean, mean, variance = combination(
            defense, samples, share, self._reduction, generator
        )
        # The noise is what matters to one, the message to the other: a gradient in
        # training mode differs from it by something that was neither clipped nor mixed.
        added = self._defense.needs == "jacobian"
        base = clean if added else after
        cost = None if self.memory is None else self.memory.cost
        return Draw(parameters, after, message - base, mean - base, variance, cost)

    def _samples(self, accumulated: int) -> tuple[Samples, Tensor]:
        if not self._kept:
            raise RuntimeError(
                "a step follows no batch that was seen; GradientDefense needs "
                "backward() to be called by the Trainer."
            )
        try:
            x, y = (torch.cat(parts) for parts in zip(*self._kept, strict=True))
        except RuntimeError as error:
            raise RuntimeError(
                f"micro-batches of one step have samples of different shapes "
                f"({[tuple(x.shape) for x, _ in self._kept]}); give them one shape, or "
                f"set accumulate_grad_batches=1."
            ) from error
        sizes = [len(part) for part, _ in self._kept]
        each = [averaging(n, self._reduction) / accumulated for n in sizes]
        share = torch.tensor(each, dtype=torch.float64, device=x.device)
        share = share.repeat_interleave(torch.tensor(sizes, device=x.device))
        basis = None if self.memory is None else self.memory.basis
        return Samples(self._gradients, x, y, basis=basis), share

    def _parameters(self, optimizer: Optimizer | None = None) -> list[nn.Parameter]:
        held = {
            name.replace("_orig_mod.", ""): p
            for name, p in self._module.named_parameters()
        }
        names = list(self._gradients.sizes())
        foreign = [name for name in names if name not in held]
        if foreign:
            raise ValueError(
                f"the criterion trains {foreign[0]!r}, which is no parameter of the "
                f"{type(self._module).__name__}; make the criterion a part of it."
            )
        chosen = {name: held[name] for name in names}
        if optimizer is not None:
            ids = {id(p) for p in consumed(optimizer)}
            for name, p in chosen.items():
                if id(p) not in ids:
                    raise RuntimeError(
                        f"parameter {name!r} is trained but this step has no gradient "
                        f"for it; freeze it with requires_grad_(False), or add it to "
                        f"the optimiser."
                    )
            if len(ids) > len(chosen):
                raise RuntimeError(
                    "the optimiser consumes gradients of parameters with "
                    "requires_grad=False; set their grad to None when freezing them."
                )
        return list(chosen.values())


def _described(batch: Any) -> str:
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        inner = ", ".join(type(part).__name__ for part in batch)
        return f"{type(batch).__name__} of ({inner})"
    return f"a {type(batch).__name__}"


# How far a clipped gradient may be from a multiple of the unclipped one.
_PARALLEL = 1e-3


def combination(
    defense: Defense,
    samples: Samples,
    share: Float[Tensor, " n"],
    reduction: Reduction,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """One message for samples that don't have equal parts in it.

    Their gradients, in proportion to their parts, are the rows that the defense
    combines, so that no part is larger than 1. What that leaves to multiply with is 1
    for the mean over equal micro-batches; the budget of `EigenNoise` is stated for the
    message, that of `DPSGD` for a sum or mean before it.

    Args:
        defense: the defense.
        samples: the samples.
        share: the factor on each sample's gradient.
        reduction: how the loss combines samples of a micro-batch.
        generator: random stream.

    Returns:
        Message, clean gradient, expected message, ``(d_θ,)`` each, float64; and
        E‖noise‖² of the message.
    """
    each = samples.gradient
    if defense.needs == "samples":  # what it shares of each is not a multiple of g
        made = defense.protect(each, generator=generator, samples=samples)
        weights, squares = share, share.square()
    else:
        parts = share / averaging(len(samples), reduction)
        most = float(parts.max())
        rows = each * (parts / most).to(each)[:, None]
        budget = defense.budget if defense.needs == "jacobian" else None
        if budget is not None and budget.unit != "relative":
            defense = defense.with_budget(Budget(budget.value / most, budget.unit))
        made = defense.protect_batch(
            rows, generator=generator, samples=samples, reduction=reduction
        )
        weights = torch.tensor([most], dtype=torch.float64, device=share.device)
        squares = weights.square()
    message = weights @ made.gradient.double()
    clean = weights @ made.clean.double()
    mean = clean if made.bias is None else clean + weights @ made.bias.double()
    return message, clean, mean, float(squares.to(made.variance) @ made.variance)


def relative_to(defense: Defense, norm: float) -> Defense:
    """A defense with its relative budget stated for a gradient of this norm.

    Only of one that is shaped by J: its noise is added to the gradient consumed, which
    is another than that of its samples, each alone in inference mode, under BatchNorm
    and dropout. One that isn't a dataclass, or has no relative budget, stays as it is.

    Args:
        defense: the defense.
        norm: ‖g‖ of the gradient consumed, after clipping.

    Example:
        >>> from leakwatch.defenses import EigenNoise
        >>> relative_to(EigenNoise(Budget(0.5)), 3.0).budget
        Budget(value=1.5, unit='norm')
    """
    budget = defense.budget if defense.needs == "jacobian" else None
    if budget is None or budget.unit != "relative":
        return defense
    return defense.with_budget(Budget(budget.value * norm, "norm"))


def clip_factor(
    before: Float[Tensor, " d_theta"], after: Float[Tensor, " d_theta"]
) -> float:
    """c, where clipping by norm left c · g of a gradient g.

    Args:
        before: g.
        after: what clipping left.

    Raises:
        RuntimeError: if that is no multiple of it.

    Example:
        >>> clip_factor(torch.tensor([3.0, 4.0]), torch.tensor([1.5, 2.0]))
        0.5
    """
    square = float(before.square().sum())
    if square == 0 or torch.equal(before, after):
        return 1.0
    factor = float(before @ after) / square
    if float((after - factor * before).norm()) > _PARALLEL * float(after.norm()):
        raise RuntimeError(
            "clipping changed the direction of the gradient, so that it is no longer "
            "that of the samples; clip by norm (gradient_clip_algorithm='norm')."
        )
    return factor
