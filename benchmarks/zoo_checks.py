"""The judge of ``zoo.py``: J·v and Jᵀu of one network against plain autograd.

The reference knows nothing of leakwatch: gradients of ``cross_entropy(net(x), y)`` by
autograd in float64, and their central differences at several steps h. A difference is
itself inexact, above all where a ReLU's kink lies within h of the input, so it is
believed, parameter by parameter, only as far as two steps agree. That is not enough: a
kink much nearer than both steps gives both the mean of the slopes on its two sides. So
the differences to either side have to agree as well.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from leakwatch.derivatives import GradientMap, UnsupportedModuleError

# Ordered so that the first two settle most networks.
_STEPS = (1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-5, 1e-4, 1e-3)
# Two steps that agree this well resolve a parameter; J·v has to agree as well.
_RESOLVED = 1e-3
_GOOD = 1e-5
# A share of ‖J v‖ below which rounding may hide a parameter from every step.
_NEGLIGIBLE = 1e-6
_ADJOINT = 1e-8
# Torch computes hardsigmoid with a sixth in float32, leakwatch with a true one.
_GRADIENT = 1e-6
# What float32 inside of a network may do to two ways to compute J·v. How far both are
# from J·v without float32 is up to the network: one that amplifies rounding has no
# digits of its gradient either.
_SINGLE = 1e-3


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
    generator = torch.Generator().manual_seed(1)
    vs = torch.randn(
        directions, len(x), x[0].numel(), generator=generator, dtype=x.dtype
    )
    try:
        gradients = _examined(net, x, y)
    except (UnsupportedModuleError, ValueError, TypeError) as error:
        return Verdict(
            "refused", reason=str(error), first_s=time.process_time() - started
        )
    verdict = Verdict("right", path=gradients.path, notes=gradients.notes)
    verdict.first_s = time.process_time() - started
    as_it_is: Tensor | None = None
    plain = 0.0
    if any("converts to torch.float32" in note for note in gradients.notes):
        as_it_is = gradients.jvp(x, y, vs[0])
        plain = _against_double_backward(gradients, net, x, y, vs[0], as_it_is)
        net = _Precise(net)
        gradients = _examined(net, x, y)
    reference = _Reference(net, y)
    exact, ours = reference(x), gradients(x, y)
    verdict.gradient_error = float((ours - exact).norm() / exact.norm())
    del ours
    started = time.process_time()
    images = [gradients.jvp(x, y, vs[0])]
    verdict.product_s = time.process_time() - started
    images += [gradients.jvp(x, y, v) for v in vs[1:]]
    verdict.adjoint_error = _adjoint(gradients, reference.names, x, y, vs, images)
    _judge(verdict, reference, x, vs, images, exact)
    limits = [
        ("the gradient", verdict.gradient_error, _GRADIENT),
        ("the adjoint identity", verdict.adjoint_error, _ADJOINT),
    ]
    if as_it_is is not None:
        gap = float((as_it_is - images[0]).norm() / images[0].norm())
        verdict.reason += f" J·v with its float32 parts is {gap:.0e} from that without"
        limits.append(("J·v with float32 parts", plain, _SINGLE))
    for what, error, limit in limits:
        if not error < limit:
            verdict.outcome = "wrong"
            verdict.reason += f" {what} is off by {error:.0e}"
    verdict.reason = verdict.reason.strip()
    return verdict


def _examined(net: nn.Module, x: Tensor, y: Tensor) -> GradientMap:
    gradients = GradientMap(net, dtype=torch.float64)
    gradients.check(x, y)
    gradients(x, y)
    return gradients


def _against_double_backward(
    gradients: GradientMap,
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    v: Tensor,
    image: Tensor,
) -> float:
    """Largest relative gap of ⟨u, J v⟩ to plain autograd's ⟨Jᵀu, v⟩, per sample.

    For networks with float32 inside, of which differences say nothing: Jᵀu by
    differentiating ⟨u, g⟩ once more.
    """
    generator = torch.Generator().manual_seed(3)
    u = image / image.norm(dim=1, keepdim=True)
    u = u + torch.randn(u.shape, generator=generator, dtype=u.dtype) / u.shape[1] ** 0.5
    pulled = gradients.vjp(x, y, u)
    weights = [p for p in net.parameters() if p.requires_grad]
    worst = 0.0
    for i in range(len(x)):
        leaf = x[i : i + 1].clone().requires_grad_()
        # Attention's fused kernels have no second derivative.
        with sdpa_kernel(SDPBackend.MATH):
            loss = nn.functional.cross_entropy(net.train().eval()(leaf), y[i : i + 1])
            parts = torch.autograd.grad(
                loss, weights, create_graph=True, materialize_grads=True
            )
            g = torch.cat([p.reshape(-1) for p in parts])
            plain = torch.autograd.grad(g, leaf, u[i])[0].reshape(-1)
        size = float(plain.norm())
        worst = max(worst, float((pulled[i] - plain).norm()) / size)
        along = float(image[i] @ u[i])
        worst = max(worst, abs(along - float(plain @ v[i])) / abs(along))
    return worst


class _Precise(nn.Module):
    """A network without its conversions from float64 to float32.

    With them it is a staircase, of which no difference in float64 says anything.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        with _Double():
            out: Tensor = self.net(x)
        return out


class _Double(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = (*args, *(kwargs or {}).values())
        lowers = func is Tensor.float or (
            func is Tensor.to and any(each is torch.float32 for each in given)
        )
        if lowers and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


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

    def difference(
        self, x: Tensor, here: Tensor, v: Tensor, h: float
    ) -> tuple[Tensor, Tensor]:
        """The slope of g along v from both sides, and what lies between the two.

        Args:
            x: inputs.
            here: g at ``x``.
            v: one direction per sample.
            h: the step.

        Returns:
            The mean of both slopes, and the norm of their difference per parameter.
        """
        step = h * v.view_as(x)
        ahead, behind = self(x + step), self(x - step)
        bend = self.norms(ahead + behind - 2 * here) / h
        return (ahead - behind) / (2 * h), bend

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
    here: Tensor,
) -> None:
    names = [*reference.names]
    verdict.tensors = len(names)
    settled = torch.zeros(len(names), dtype=torch.bool)
    wrong = torch.zeros(len(names), dtype=torch.bool)
    worst, resolution = 0.0, 0.0
    for v, image in zip(vs, images, strict=True):
        pairs = zip(*_errors(reference, x, here, v, image), strict=True)
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
    reference: _Reference, x: Tensor, here: Tensor, v: Tensor, image: Tensor
) -> tuple[Tensor, Tensor]:
    """Relative error of J·v per parameter, and of the difference itself."""
    claimed = reference.norms(image)
    own = torch.full_like(claimed, torch.inf)
    error = torch.zeros_like(claimed)
    last: tuple[Tensor, Tensor] | None = None
    for h in _STEPS:
        new, bend = reference.difference(x, here, v, h)
        if last is not None:
            # By what the differences say alone: beside a wrong image that is huge, any
            # two of them would agree.
            size = torch.maximum(reference.norms(last[0]), reference.norms(new))
            nothing = _NEGLIGIBLE * new.norm(dim=1, keepdim=True) + 1e-300
            tiny = torch.maximum(size, claimed) <= nothing
            size = torch.maximum(size, nothing)
            # Differences of rounded gradients are staircases: two may agree on a step.
            rounding = torch.finfo(x.dtype).eps * reference.norms(here) / h
            gap = (reference.norms(new - last[0]) + rounding) / size
            smooth = torch.minimum(bend, last[1]) <= _RESOLVED * size
            gap = torch.where(smooth, gap, torch.inf)
            miss = reference.norms(image - new) / torch.maximum(size, claimed)
            # What is nothing beside the rest, in every account of it, is settled.
            gap, miss = (torch.where(tiny, 0.0, t) for t in (gap, miss))
            # Either of two steps that agree will do; the better known one is kept.
            better = gap < own
            own = torch.where(better, gap, own)
            error = torch.where(better, miss, error)
        last = new, bend
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
