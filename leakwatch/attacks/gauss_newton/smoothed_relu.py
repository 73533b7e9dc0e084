r"""Rectifiers whose second derivative is that of many units together.

The gradient of a ReLU network is a discontinuous function of its input: when the
pre-activation z of a unit changes sign, everything that flows back through the unit
appears or disappears. The Jacobian that autograd forms knows nothing of these jumps,
although in a wide network there are thousands of them between two nearby images, and
they make most of the difference of two gradients. One jump can't be predicted; their
sum can. With a spread :math:`\tau` of z between the images, the derivative of the step
function :math:`[z > 0]` is on average a bump,

.. math:: \frac{d}{dz}[z > 0] \approx
    \frac{1}{\tau\sqrt{2\pi}}\, e^{-z^2/2\tau^2},

which tends to the exact derivative, zero for almost all z, as :math:`\tau \to 0`.
Values and first derivatives stay exact, only products with J change: a Gauss–Newton
step with them is one on the gradient averaged over nearby images (randomised smoothing,
Duchi, Bartlett & Wainwright 2012), at the cost of a single one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["SmoothedKinks"]

_NORMAL = 1 / math.sqrt(2 * math.pi)
# Below this part of the spread of z the bump is narrower than any difference that
# matters; it also keeps the division finite.
_NARROW = 1e-9


def _bump(z: Tensor, width: Tensor) -> Tensor:
    """Density of N(0, width²) at z; zero where the width is."""
    safe = torch.where(width > 0, width, torch.ones_like(width))
    density = torch.exp(-0.5 * (z / safe).square()) * (_NORMAL / safe)
    return torch.where(width > 0, density, torch.zeros_like(density))


class _Step(torch.autograd.Function):
    """[z > 0], with a bump for its derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, width: Tensor) -> Tensor:
        return (z > 0).to(z.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        z, width = ctx.saved_tensors
        return grad * _bump(z, width), None

    @staticmethod
    def jvp(ctx: Any, dz: Tensor, dwidth: Tensor | None) -> Tensor:
        z, width = ctx.saved_tensors
        return dz * _bump(z, width)


class _SmoothedRelu(torch.autograd.Function):
    """max(z, 0), whose derivative is :class:`_Step`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, width: Tensor) -> Tensor:
        return z.clamp_min(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        z, width = ctx.saved_tensors
        return grad * _step(z, width), None

    @staticmethod
    def jvp(ctx: Any, dz: Tensor, dwidth: Tensor | None) -> Tensor:
        z, width = ctx.saved_tensors
        return dz * _step(z, width)


def _step(z: Tensor, width: Tensor) -> Tensor:
    out: Tensor = _Step.apply(z, width)
    return out


def _relu(z: Tensor, width: Tensor) -> Tensor:
    out: Tensor = _SmoothedRelu.apply(z, width)
    return out


_RELUS = {F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
_LEAKY = {F.leaky_relu, F.leaky_relu_}
_IN_PLACE = {F.relu_, torch.relu_, Tensor.relu_, F.leaky_relu_}


@final
class SmoothedKinks(TorchFunctionMode):
    """While entered, ReLU and leaky ReLU have bumps for second derivatives.

    Args:
        width: τ as a part of the root mean square of the pre-activations of one call,
            a scalar tensor, at least 0; 0 leaves everything as it is.

    Attributes:
        met: whether there was any such call.

    Example:
        >>> import torch
        >>> z = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        >>> with SmoothedKinks(torch.tensor(1.0)):
        ...     slope = torch.autograd.grad(torch.relu(z), z, create_graph=True)[0]
        >>> round(torch.autograd.grad(slope, z)[0].item(), 4)  # N(0.5; 0, 0.5²)
        0.4839
    """

    def __init__(self, width: Tensor) -> None:
        super().__init__()
        self.width = width
        self.met = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _RELUS and func not in _LEAKY:
            return func(*args, **kwargs)
        z = args[0] if args else kwargs["input"]
        inplace = func in _IN_PLACE
        slope = 0.0
        if func in _LEAKY:
            slope = args[1] if len(args) > 1 else kwargs.get("negative_slope", 0.01)
            inplace |= bool(args[2] if len(args) > 2 else kwargs.get("inplace", False))
        else:
            inplace |= bool(args[1] if len(args) > 1 else kwargs.get("inplace", False))
        self.met = True
        target, z = z, z.clone() if inplace else z
        spread = z.detach().square().mean().sqrt()
        width = self.width.to(spread) * spread
        width = torch.where(width > _NARROW * spread, width, torch.zeros_like(width))
        out = (1 - slope) * _relu(z, width) + slope * z if slope else _relu(z, width)
        return target.copy_(out) if inplace else out
