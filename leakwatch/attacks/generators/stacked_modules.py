"""Many copies of one network, each with parameters of its own."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

__all__ = ["ModuleCopies"]

_log = logging.getLogger(__name__)


@final
class ModuleCopies:
    """Copies of a network whose parameters are stacked, ``(copies, ...)`` each.

    Stacked parameters are leaves: an elementwise optimiser treats all copies at once
    and none of them feels the others. In eval mode copies run batched; in train mode,
    and where ``torch.func`` can't transform the network, one after another.

    Args:
        modules: at least one network, all of the same architecture. They are copied.
        train: whether they run in train mode: BatchNorm then normalises with what it
            sees, which couples the inputs of one copy, and buffers move, for each copy
            apart.
        dtype: arithmetic.
        device: where.

    Raises:
        ValueError: without modules, or for modules without parameters.

    Attributes:
        parameters: by name, leaves.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        train: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if not modules or not any(True for _ in modules[0].parameters()):
            raise ValueError(
                "copies need at least one network that has parameters; a generator "
                "without any can only be searched by its latents."
            )
        own = [copy.deepcopy(m).to(device, dtype).train(train) for m in modules]
        for module in own:
            module.requires_grad_(True)
        self.parameters, self._buffers = stack_module_state(own)
        self._base = own[0]
        self._count = len(own)
        self._train = train
        self._batched = not train and len(own) > 1

    def __len__(self) -> int:
        return self._count

    def __call__(
        self, z: Float[Tensor, "copies inputs ..."]
    ) -> Float[Tensor, "copies inputs ..."]:
        """Each copy's outputs for its own inputs.

        Args:
            z: inputs, a batch for each copy.

        Returns:
            Outputs, differentiable in inputs and parameters.
        """
        if not self._batched:
            return self._one_by_one(z)
        try:
            # Buffers go in as they are: nothing writes to them in eval mode.
            out: Tensor = vmap(self._one, randomness="different")(
                self.parameters, self._buffers, z
            )
            return out
        except RuntimeError as error:
            why = str(error).split("\n")[0]
        out = self._one_by_one(z)
        self._batched = False
        _log.warning(
            "leakwatch runs the copies of %s one by one, which is slower: %s",
            type(self._base).__name__,
            why,
        )
        return out

    def _one_by_one(self, z: Tensor) -> Tensor:
        # The derivative of unbind is one stack; that of indexing is a stack of zeros
        # for each copy.
        own = {k: p.unbind() for k, p in self.parameters.items()}
        rows = []
        for i in range(self._count):
            parameters = {k: p[i] for k, p in own.items()}
            # What the forward writes to a buffer lands in the stack.
            buffers = {k: b[i] for k, b in self._buffers.items()}
            rows.append(self._one(parameters, buffers, z[i]))
        return torch.stack(rows)

    def _one(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], z: Tensor
    ) -> Tensor:
        out: object = functional_call(self._base, (parameters, buffers), (z,))
        if not isinstance(out, Tensor):
            raise TypeError(
                f"a generator must return one tensor of images, "
                f"{type(self._base).__name__} returned a {type(out).__name__}."
            )
        return out
