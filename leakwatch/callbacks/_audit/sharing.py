"""What an attacker is given: gradients after a defense and with noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from leakwatch.attacks import SharedGradient
from leakwatch.attacks.start import stream
from leakwatch.callbacks._audit.plan import Audit
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.runtime.rng_and_precision import isolated_rng

__all__ = ["defended", "share_gradients"]


def share_gradients(
    gradients: GradientMap,
    x: Tensor,
    y: Tensor,
    index: Sequence[int],
    audit: Audit,
) -> tuple[SharedGradient | None, list[int]]:
    """What these samples would share, defense and noise included.

    A sample's defense and noise draw from a stream that its index names: what else is
    audited, in which process and after which training, changes nothing.

    Args:
        gradients: the gradient map.
        x: network inputs.
        y: labels.
        index: data-set index of each sample.
        audit: for the defense and the noise.

    Returns:
        The gradients of the samples where they are finite, and which these are.

    Raises:
        TypeError: if the defense returns no tensor.
        ValueError: if it changes the shape.
    """
    clean = gradients(x, y)
    kept, good = [], []
    for i, sample in enumerate(index):
        g = clean[i : i + 1]
        if audit.perturb is not None:
            with isolated_rng():
                torch.manual_seed(stream(audit.seed, sample, 1).initial_seed() % 2**63)
                g = defended(audit.perturb, g)
        noise = torch.randn(
            g.shape, dtype=torch.float64, generator=stream(audit.seed, sample)
        )
        g = g + (audit.noise_std * noise).to(g)
        if bool(torch.isfinite(g).all()):
            kept.append(g)
            good.append(i)
    if not good:
        return None, good
    return (
        SharedGradient(
            torch.cat(kept),
            y[good, None],
            tuple(x.shape[1:]),
            noise_std=audit.noise_std,
            index=tuple(index[i] for i in good),
            left=None
            if audit.perturb is None
            else (torch.cat(kept) - clean[good]).double().norm(dim=1),
        ),
        good,
    )


def defended(perturb: Callable[[Tensor], Tensor], g: Tensor) -> Tensor:
    """What a defense makes of gradients ``(n, d_θ)``.

    Raises:
        TypeError: if it doesn't return a tensor.
        ValueError: if it changes the shape.
    """
    out: object = perturb(g.clone())
    if not isinstance(out, Tensor):
        raise TypeError(
            f"perturb must return the gradients that are shared, a tensor of shape "
            f"(n, d_θ), but returned {type(out).__name__}."
        )
    if out.shape != g.shape:
        raise ValueError(
            f"perturb must keep the shape {tuple(g.shape)} of the gradients, but "
            f"returned {tuple(out.shape)}."
        )
    return out.detach().to(g)
