"""What a module does besides its formula: draws, mixes its batch, hooks gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from leakwatch.derivatives.runtime import SampleLoss, Weights, watches
from leakwatch.derivatives.verification.agreement import agreement
from leakwatch.derivatives.verification.failures import attempt
from leakwatch.derivatives.verification.rounding import Rounding

__all__ = ["batch_dependence", "gradient_hooks", "is_random"]


def batch_dependence(
    loss: SampleLoss, at: Weights, xs: Tensor, ys: Tensor, rounding: Rounding
) -> list[str]:
    """A note if the loss of a sample is another in a batch, beyond rounding."""
    fixed = {k: t.clone() for k, t in at.fixed.items()}

    def each(at: Weights, xs: Tensor) -> Tensor:
        pairs = zip(xs, ys, strict=True)
        return torch.stack([loss.sample(at.shared, at.fixed, x, y) for x, y in pairs])

    with torch.no_grad():
        alone = each(at, xs)
        together, _ = attempt(
            lambda: loss.batch(at.shared | fixed, xs.clone(), ys.clone())
        )
        if together is None:  # it takes one sample at a time, as it will be given
            return []
        compared = agreement(together, alone, "loss in a batch", dtype=xs.dtype)
        gap = float((together.double() - alone.double()).norm())
        if compared.holds or rounding.explains(gap, each, at, xs):
            return []
    norms = [
        name
        for name, m in loss.module.named_modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is None
    ]
    because = f", because of batch statistics in {', '.join(norms)}" if norms else ""
    return [
        f"the loss of a sample depends on the others in its batch{because}; every "
        f"sample is evaluated alone, in a batch of one"
    ]


def gradient_hooks(loss: SampleLoss) -> list[str]:
    """A note if parameters have hooks that would change their gradients."""
    names = [
        name.removeprefix("module.")
        for name, p in loss.named_parameters()
        if any(not watches(hook) for hook in (p._backward_hooks or {}).values())
    ]
    if not names:
        return []
    return [
        f"hooks on {', '.join(names[:3])}{' …' if len(names) > 3 else ''} "
        f"(Parameter.register_hook) are not applied: the gradient is that before them"
    ]


def is_random(loss: SampleLoss, at: Weights, x: Tensor, y: Tensor) -> bool:
    """Whether the loss of one sample changes from one evaluation to the next."""

    def value() -> Tensor:
        with torch.no_grad():
            return loss.sample(at.shared, at.fixed, x, y)[None]

    before = _stream(x)
    first = value()
    # A forward that draws numbers may still give the same result most of the time.
    repeats = 1 if torch.equal(before, _stream(x)) else 8
    return not all(
        agreement(value(), first, "loss again", dtype=x.dtype).holds
        for _ in range(repeats)
    )


def _stream(x: Tensor) -> Tensor:
    return torch.cuda.get_rng_state(x.device) if x.is_cuda else torch.get_rng_state()
