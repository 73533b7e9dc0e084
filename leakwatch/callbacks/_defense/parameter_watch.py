"""Sees changes of parameters that no defended step has made, by comparing them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

import torch
from torch import Tensor, nn

__all__ = ["ParameterWatch"]

_MOST_NAMED: Final = 3
_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@final
class ParameterWatch:
    """Remembers what trained parameters hold, and refuses every change but a step's.

    Args:
        module: what is trained. Weights that a forward renormalises are not watched.
    """

    def __init__(self, module: nn.Module) -> None:
        renormalised = {
            id(part.weight)
            for part in module.modules()
            if isinstance(part, nn.Embedding | nn.EmbeddingBag)
            and part.max_norm is not None
        }
        self._watched = [
            (name, p)
            for name, p in module.named_parameters()
            if p.requires_grad and id(p) not in renormalised
        ]
        self._known = _checksums(p for _, p in self._watched)

    def stepped(self, parameters: Iterable[Tensor]) -> None:
        """Accepts what these hold now.

        Args:
            parameters: of the optimiser that took a defended step.
        """
        theirs = {id(p) for p in parameters}
        at = [i for i, (_, p) in enumerate(self._watched) if id(p) in theirs]
        now = _checksums(self._watched[i][1] for i in at)
        for i, checksum in zip(at, now, strict=True):
            self._known[i] = checksum

    def check(self) -> None:
        """Compares with what is known.

        Raises:
            RuntimeError: names the parameters that have changed.
        """
        now = _checksums(p for _, p in self._watched)
        pairs = zip(self._watched, now, self._known, strict=True)
        changed = [name for (name, _), there, known in pairs if there != known]
        if changed:
            names = ", ".join(changed[:_MOST_NAMED])
            more = " …" if len(changed) > _MOST_NAMED else ""
            raise RuntimeError(
                f"{names}{more} changed outside of a defended step, so what is shared "
                f"is not defended; take every step through an optimizer that "
                f"configure_optimizers returns and self.optimizers() gives, and change "
                f"weights after a step, if you must, in a hook of that optimizer "
                f"(register_step_post_hook)."
            )


def _checksums(parameters: Iterable[Tensor]) -> list[int]:
    """Sums of the bits of each: any update changes them, however small it is."""
    sums = []
    for p in parameters:
        real = torch.view_as_real(p.detach()) if p.is_complex() else p.detach()
        bits = real.reshape(-1).view(_BITS[real.dtype.itemsize])
        sums.append(bits.sum(dtype=torch.int64))
    return torch.stack(sums).tolist() if sums else []
