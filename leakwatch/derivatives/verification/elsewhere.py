"""What a batched forward by layers can't follow: stray weights, looks at numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leakwatch.derivatives.layers.modules import NotLayerwiseError, readable
from leakwatch.derivatives.runtime import Weights

__all__ = ["check_own"]

_LOOK = torch.ops.aten._local_scalar_dense


def check_own(at: Weights, losses: Callable[[dict[str, Tensor]], Tensor]) -> None:
    """Refuses a network that does more than its layers, where nobody follows it.

    Weights that are used outside their layers, a penalty in the criterion or a norm
    without a gradient, may change values by less than a comparison sees, or only at
    other weights. A forward that looks at a number can take another way for other
    images, and then all images of a batch take it.

    Args:
        at: the weights.
        losses: of some images, with the layers replaced and these tensors in place of
            the shared parameters, by name.

    Raises:
        NotLayerwiseError: names the weights.
    """
    placed = {name: p.detach().clone() for name, p in at.shared.items()}
    watch = _Watch({_address(p): name for name, p in placed.items() if p.numel()})
    with watch:
        losses({name: p.requires_grad_() for name, p in placed.items()})
    if watch.seen:
        raise NotLayerwiseError(
            f"the loss uses {readable(watch.seen)} outside their layers too"
        )
    if watch.looks:
        raise NotLayerwiseError(
            "the forward looks at numbers (.item(), or a tensor as a condition), so "
            "that images of one batch could not take different ways"
        )


@final
class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation below autograd, whatever it hides from it."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self.seen: set[str] = set()
        self.looks = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.looks |= func.overloadpacket is _LOOK
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor) and t.layout == torch.strided and t.numel():
                name = self._names.get(_address(t))
                if name is not None:
                    self.seen.add(name)
        return func(*args, **kwargs)


def _address(t: Tensor) -> int:
    # Of the storage: views and what was detached stand for the same numbers.
    return t.untyped_storage().data_ptr()
