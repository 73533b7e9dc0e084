"""The judge of ``zoo.py``: J·v and Jᵀu of one network against plain autograd.

The reference knows nothing of leakwatch: gradients of ``cross_entropy(net(x), y)`` by
autograd in float64, and their central differences at several steps h. A difference is
itself inexact, above all where a ReLU's kink lies within h of the input, so it is
believed, parameter by parameter, only as far as two steps agree.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from leakwatch.gradients import GradientMap, UnsupportedModuleError

# Ordered so that the first two settle most networks.
_STEPS = (1e-6, 1e-7, 1e-8, 1e-5, 1e-4)
# Two steps that agree this well resolve a parameter; J·v has to agree as well.
_RESOLVED = 1e-3
_GOOD = 1e-5
# A share of ‖J v‖ below which rounding may hide a parameter from every step.
_NEGLIGIBLE = 1e-6
_ADJOINT = 1e-8
# Torch computes hardsigmoid with a sixth in float32, leakwatch with a true one.
_GRADIENT = 1e-6


@dataclass
class Verdict:
    """What the check of one network found; see ``zoo.py`` for the outcomes."""

    outcome: str
    path: str = "–"
    reason: str = ""
    notes: tuple[str, ...] = ()
    gradient_error: float = float("nan")
    jvp_error: float = float("nan")
    jvp_resolution: float = float("nan")
    adjoint_error: float = float("nan")
    first_s: float = float("nan")
    product_s: float = float("nan")
    tensors: int = 0
    unresolved: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def check(net: nn.Module, x: Tensor, y: Tensor, directions: int = 2) -> Verdict:
    """Compares the library with plain autograd on each sample.

    Args:
        net: the network, eval mode, float64.
        x: inputs, float64.
        y: labels.
        directions: directions v per sample.

    Returns:
        The verdict.
    """
    started = time.process_time()
    gradients = GradientMap(net, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    vs = torch.randn(
        directions, len(x), x[0].numel(), generator=generator, dtype=x.dtype
    )
    try:
        gradients.check(x, y)
        gradients(x, y)
    except (UnsupportedModuleError, ValueError, TypeError) as error:
        return Verdict(
            "refused", reason=str(error), first_s=time.process_time() - started
        )
    verdict = Verdict("right", path=gradients.path, notes=gradients.notes)
    verdict.first_s = time.process_time() - started
    reference = _Reference(net, y)
    exact, ours = reference(x), gradients(x, y)
    verdict.gradient_error = float((ours - exact).norm() / exact.norm())
    del ours, exact
    started = time.process_time()
    images = [gradients.jvp(x, y, vs[0])]
    verdict.product_s = time.process_time() - started
    images += [gradients.jvp(x, y, v) for v in vs[1:]]
    verdict.adjoint_error = _adjoint(gradients, reference.names, x, y, vs, images)
    _judge(verdict, reference, x, vs, images)
    for what, error, limit in (
        ("the gradient", verdict.gradient_error, _GRADIENT),
        ("the adjoint identity", verdict.adjoint_error, _ADJOINT),
    ):
        if not error < limit:
            verdict.outcome = "wrong"
            verdict.reason += f" {what} is off by {error:.0e}"
    return verdict


class _Reference:
    """Gradients by plain autograd, flat, in the order of ``named_parameters``.

    All samples are in one batch, because Torch's BatchNorm can be wrong for one alone.
    """

    def __init__(self, net: nn.Module, y: Tensor) -> None:
        self.net, self.y = net, y
        named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
        self.names = {name: p.numel() for name, p in named}
        self.weights = [p for _, p in named]

    def __call__(self, x: Tensor) -> Tensor:
        # Networks that keep what they derived from weights forget it in train mode.
        logits = self.net.train().eval()(x)
        losses = nn.functional.cross_entropy(logits, self.y, reduction="none")
        rows = []
        for loss in losses:
            parts = torch.autograd.grad(
                loss,
                self.weights,
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            rows.append(torch.cat([p.reshape(-1) for p in parts]))
        return torch.stack(rows)

    def difference(self, x: Tensor, v: Tensor, h: float) -> Tensor:
        step = h * v.view_as(x)
        return (self(x + step) - self(x - step)) / (2 * h)

    def norms(self, flat: Tensor) -> Tensor:
        """Norm of each parameter's part, ``(samples, parameters)``."""
        parts = flat.split([*self.names.values()], dim=1)
        return torch.stack([p.norm(dim=1) for p in parts], dim=1)


def _judge(
    verdict: Verdict,
    reference: _Reference,
    x: Tensor,
    vs: Tensor,
    images: list[Tensor],
) -> None:
    names = [*reference.names]
    verdict.tensors = len(names)
    settled = torch.zeros(len(names), dtype=torch.bool)
    wrong = torch.zeros(len(names), dtype=torch.bool)
    worst, resolution = 0.0, 0.0
    for v, image in zip(vs, images, strict=True):
        pairs = zip(*_errors(reference, x, v, image), strict=True)
        for error, own in pairs:
            known = own <= _RESOLVED
            off = known & ~(error <= _RESOLVED + 3 * own)
            wrong |= off
            settled |= known
            if bool(known.any()):
                j = int(torch.where(known, error, -1.0).argmax())
                if float(error[j]) > worst:
                    worst, resolution = float(error[j]), float(own[j])
    verdict.jvp_error, verdict.jvp_resolution = worst, resolution
    verdict.unresolved = [n for n, s in zip(names, settled, strict=True) if not s]
    verdict.wrong = [n for n, w in zip(names, wrong, strict=True) if w]
    if verdict.wrong:
        verdict.outcome = "wrong"
        verdict.reason = f"J·v is off in {len(verdict.wrong)} of {len(names)} tensors"
    elif verdict.unresolved:
        verdict.outcome = "unclear"
        verdict.reason = (
            f"no difference resolves {len(verdict.unresolved)} of {len(names)} tensors"
        )


def _errors(
    reference: _Reference, x: Tensor, v: Tensor, image: Tensor
) -> tuple[Tensor, Tensor]:
    """Relative error of J·v per parameter, and of the difference itself."""
    whole = image.norm(dim=1, keepdim=True)
    sizes = reference.norms(image)
    own = torch.full_like(sizes, torch.inf)
    error = torch.zeros_like(sizes)
    differences: dict[float, Tensor] = {}
    for h in _STEPS:
        new = reference.difference(x, v, h)
        size = torch.maximum(sizes, reference.norms(new))
        size = size.clamp_min(1e-300)
        for other in differences.values():
            gap = reference.norms(new - other)
            # What is nothing beside the rest, in every account of it, is settled.
            gap = torch.where(size <= _NEGLIGIBLE * whole, 0.0, gap)
            # Either of two steps that agree will do; the better known one is kept.
            better = gap / size < own
            own = torch.where(better, gap / size, own)
            miss = reference.norms(image - new)
            miss = torch.where(size <= _NEGLIGIBLE * whole, 0.0, miss)
            error = torch.where(better, miss / size, error)
        differences = dict(list(differences.items())[-1:]) | {h: new}
        if bool((own <= _GOOD).all()):
            break
    return error, own


def _adjoint(
    gradients: GradientMap,
    sizes: dict[str, int],
    x: Tensor,
    y: Tensor,
    vs: Tensor,
    images: list[Tensor],
) -> float:
    """Largest |⟨u, J v⟩ − ⟨Jᵀu, v⟩|, relative to the terms of the sum."""
    generator = torch.Generator().manual_seed(2)
    u = torch.randn(images[0].shape, generator=generator, dtype=x.dtype)
    # Each parameter counts alike, however small its part of J v.
    for part, image in zip(
        u.split([*sizes.values()], dim=1),
        images[0].split([*sizes.values()], dim=1),
        strict=True,
    ):
        norm = image.norm(dim=1, keepdim=True)
        floor = _NEGLIGIBLE * images[0].norm(dim=1, keepdim=True)
        part.div_(torch.maximum(norm, floor).clamp_min(1e-300))
    pulled = gradients.vjp(x, y, u)
    worst = 0.0
    for v, image in zip(vs, images, strict=True):
        for i in range(len(x)):
            terms = torch.stack(
                [p.sum() for p in (u[i] * image[i]).split([*sizes.values()])]
            )
            gap = abs(float(terms.sum() - pulled[i] @ v[i]))
            worst = max(worst, gap / max(float(terms.norm()), 1e-300))
    return worst
