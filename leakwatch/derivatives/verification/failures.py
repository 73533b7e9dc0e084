"""Why a derivative could not be formed: the operation, the submodule, what helps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from leakwatch.derivatives.runtime import UnsupportedModuleError
from leakwatch.derivatives.runtime.chunking import out_of_memory
from leakwatch.derivatives.verification.forward_watch import (
    ForwardWatch,
    RunningModules,
)
from leakwatch.status import shortened

__all__ = ["Failure", "attempt", "culprit_of", "first_line", "remedy"]

_REMEDIES = {
    "scaled_dot_product": "leave the choice of an attention kernel to torch",
}


@dataclass(frozen=True)
class Failure:
    """Why torch.func gives no derivative: of which product, in which words."""

    product: Callable[[], Any]
    text: str
    detail: str = ""


def attempt(f: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """The result of ``f``, or ``None`` and why there is none.

    Raises:
        UnsupportedModuleError: as ``f`` does; running out of memory passes as well.
    """
    try:
        return f(), None
    except UnsupportedModuleError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        return None, error


def culprit_of(
    module: nn.Module, product: Callable[[], Any], watch: ForwardWatch
) -> str:
    """Names the submodule in which, or because of which, a product fails."""
    modules = RunningModules(module)
    with modules.followed():
        _, error = attempt(product)
    where = modules.here
    if not where:  # it failed in a backward pass, whose error may name the operation
        text = str(error)
        named = [name for name in watch.operations if len(name) > 4 and name in text]
        where = watch.operations[max(named, key=len)] if named else ""
    return f" because of {where}" if where else ""


def remedy(error: BaseException) -> str:
    """What helps against an error, in parentheses; empty if nothing is known."""
    remedies = [r for name, r in _REMEDIES.items() if name in str(error)]
    return f" ({remedies[0]})" if remedies else ""


def first_line(error: BaseException) -> str:
    """The start of an error's text, or its type if it has none."""
    text = str(error).strip() or type(error).__name__
    return shortened(text.splitlines()[0], 200).rstrip(".")
