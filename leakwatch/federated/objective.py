"""What a client minimises, as a function of weights that are not the module's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from leakwatch.derivatives.losses import classification_criterion
from leakwatch.derivatives.runtime import (
    Criterion,
    SampleLoss,
    Weights,
    check_module,
    evaluating,
    underlying,
)
from leakwatch.derivatives.runtime.rng_and_precision import isolated_rng

__all__ = ["Objective"]

_PREFIX = "module."


@final
class Objective:
    """The mean loss of samples, for any weights, without touching the module.

    Flat vectors hold the parameters that require gradients in the order of
    :class:`leakwatch.derivatives.GradientMap`.

    Args:
        module: the network.
        criterion: one loss per sample. Default: accurate cross-entropy of
            ``module(x)``.
        dtype: arithmetic, float32 or float64. Default: that of the parameters where
            it is one of these, else float32.

    Attributes:
        loss: module and criterion as one module.
        dtype: the arithmetic.

    Raises:
        TypeError: if ``module`` is no ``nn.Module``.
        ValueError: for a module without trainable parameters, or another dtype.

    Example:
        >>> objective = Objective(nn.Linear(3, 2))
        >>> objective.size
        8
    """

    def __init__(
        self,
        module: nn.Module,
        criterion: Criterion | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        module = underlying(module)
        check_module(module)
        self.module = module
        self.loss = SampleLoss(
            module, classification_criterion if criterion is None else criterion
        )
        if dtype is None:
            own = next(iter(self._shared().values())).dtype
            dtype = own if own == torch.float64 else torch.float32
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"dtype must be torch.float32, torch.float64 or None, got {dtype}."
            )
        self.dtype = dtype

    @property
    def size(self) -> int:
        """d_θ, the number of trained weights."""
        return sum(p.numel() for p in self._shared().values())

    @contextmanager
    def evaluation(self, device_type: str) -> Iterator[Weights]:
        """Inference mode, full precision; everything is undone afterwards.

        Args:
            device_type: where the samples are.

        Yields:
            Copies of weights and buffers as they are now, which may be written into.
        """
        with evaluating(
            self.loss, device_type, self.dtype, substitutes=False
        ) as weights:
            own = {name: t.clone() for name, t in weights.fixed.items()}
            yield Weights(weights.shared, own)

    def gradient(
        self,
        weights: Weights,
        x: Float[Tensor, "batch ..."],
        y: Shaped[Tensor, "batch ..."],
    ) -> tuple[Float[Tensor, ""], list[Tensor | None]]:
        """Mean loss of a batch and its gradient in each shared parameter.

        Args:
            weights: the point; shared ones require gradients. What a forward writes
                into buffers goes into those given here.
            x: network inputs.
            y: labels.

        Returns:
            The loss, and one gradient per shared parameter; ``None`` for those that
            the loss does not use.
        """
        shared = weights.shared
        # Checkpointed parts of a forward run again in the backward pass, and must find
        # the same weights.
        with torch.enable_grad(), self.loss.holding():
            mean = self.loss.batch({**weights.fixed, **shared}, x, y).mean()
            gradients = torch.autograd.grad(
                mean, list(shared.values()), allow_unused=True
            )
        return mean.detach(), list(gradients)

    def flat_gradient(
        self,
        weights: Weights,
        x: Float[Tensor, "batch ..."],
        y: Shaped[Tensor, "batch ..."],
    ) -> Float[Tensor, " d_theta"]:
        """As :meth:`gradient`, as one vector; leaves no trace.

        Buffers and random streams stay as they were. Dropout draws what the streams
        would give next, so the next batch of a client draws from the same place.
        """
        kept = {name: t.clone() for name, t in weights.fixed.items()}
        with isolated_rng():
            gradients = self.gradient(Weights(weights.shared, kept), x, y)[1]
        return self.flat_of(weights, gradients)

    def at(self, weights: Weights, flat: Float[Tensor, " d_theta"]) -> Weights:
        """The same point with other shared weights.

        Args:
            weights: of an evaluation.
            flat: all shared weights.

        Returns:
            Weights that require gradients, cast and copied.
        """
        sizes = [t.numel() for t in weights.shared.values()]
        parts = torch.split(flat.detach(), sizes)
        shared = {
            name: part.to(own).reshape(own.shape).clone().requires_grad_()
            for (name, own), part in zip(weights.shared.items(), parts, strict=True)
        }
        return Weights(shared, weights.fixed)

    @staticmethod
    def flat_of(
        weights: Weights, entries: Sequence[Tensor | None]
    ) -> Float[Tensor, " d_theta"]:
        """One vector from one tensor per shared parameter; ``None`` is zero."""
        pairs = zip(weights.shared.values(), entries, strict=True)
        parts = [torch.zeros_like(own) if t is None else t for own, t in pairs]
        return torch.cat([t.detach().reshape(-1) for t in parts])

    def buffers_of(self, weights: Weights) -> dict[str, Tensor]:
        """The module's buffers, by its own names.

        Entries that no forward changed are the module's own, bit by bit, also where
        the arithmetic is narrower than they are; a buffer has the wider of both types.
        """
        own = {_PREFIX + name: t for name, t in self.module.named_buffers()}
        return {
            name.removeprefix(_PREFIX): _merged(own[name].detach(), t)
            for name, t in weights.fixed.items()
            if name in own
        }

    def check_server(self) -> None:
        """Raises ValueError for weights too coarse to hold an average.

        Rounded after each round, updates below half a unit in the last place vanish.
        """
        for name, p in self._shared().items():
            if p.dtype.itemsize < 4:
                raise ValueError(
                    f"{name.removeprefix(_PREFIX)} is {p.dtype}: the average of each "
                    f"round would be rounded to it, and small updates would vanish; "
                    f"call module.float() first (in a Trainer, precision='32-true')."
                )

    @torch.no_grad()
    def put(
        self, flat: Float[Tensor, " d_theta"], buffers: Mapping[str, Tensor]
    ) -> None:
        """Writes weights and buffers into the module itself.

        Args:
            flat: all shared weights.
            buffers: by the module's names; those left out stay as they are.
        """
        own = list(self._shared().values())
        parts = torch.split(flat, [p.numel() for p in own])
        for p, part in zip(own, parts, strict=True):
            p.copy_(part.reshape(p.shape))
        targets = dict(self.module.named_buffers())
        for name, value in buffers.items():
            targets[name].copy_(value)

    def _shared(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.loss.named_parameters() if p.requires_grad}


def _merged(own: Tensor, trained: Tensor) -> Tensor:
    sent = own.to(trained.dtype)
    same = (trained == sent) | ((trained != trained) & (sent != sent))
    wide = torch.promote_types(own.dtype, trained.dtype)
    return torch.where(same, own.to(wide), trained.to(wide))
