"""Arguments that callbacks have in common, stated once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Literal, TypedDict, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor, nn

from leakwatch.names import meant
from leakwatch.normalization import Channels
from leakwatch.priors import GaussianPrior
from leakwatch.scores.api import PriorName

__all__ = ["ProbeOptions", "RecordOptions", "check_options", "with_options_of"]

_Function = TypeVar("_Function", bound=Callable[..., None])


class RecordOptions(TypedDict, total=False):
    """Arguments of every callback that records, as LeakageMonitor explains them."""

    every_n_epochs: int
    epsilon: float
    prior_std: float | None
    data_range: float | None
    mean: Channels | None
    std: Channels | None
    criterion: (
        Literal["training_step"] | Callable[[nn.Module, Tensor, Tensor], Tensor] | None
    )
    dtype: str | torch.dtype
    max_memory: float
    seed: int
    directory: str | None
    report: bool
    live: bool
    log: str
    log_images: bool
    log_ledger: bool
    verbose: bool


class ProbeOptions(RecordOptions, total=False):
    """The same of every callback that watches fixed probes."""

    prior: PriorName | GaussianPrior | None
    prepare: Callable[[Tensor], Tensor] | None
    target_psnr: float
    solver: str
    products: int


def check_options(callback: object, options: Mapping[str, object]) -> None:
    """Refuses keywords that no callback has, in the name of what was called.

    Args:
        callback: that is being made.
        options: what its own constructor does not know.

    Raises:
        TypeError: for other keywords than those of `RecordOptions`.
    """
    known = get_type_hints(RecordOptions)
    for name in options:
        if name not in known:
            has = inspect.signature(type(callback)).parameters
            raise TypeError(
                f"{type(callback).__name__} has no argument {name!r}; "
                f"{meant(name, has)}it has {', '.join(has)}."
            )


def with_options_of(base: type) -> Callable[[_Function], _Function]:
    """Makes ``**options`` of a constructor visible as the keywords of its base.

    To a type checker the options are a ``TypedDict``, which can't state defaults. All
    that looks at the signature at run time (``help``, editors, LightningCLI and the
    config that it saves) finds each keyword with the default that the base gives it.

    Args:
        base: whose constructor gets the options.
    """
    inherited = inspect.signature(base).parameters
    types = get_type_hints(base.__init__)  # type: ignore[misc]

    def decorate(constructor: _Function) -> _Function:
        signature = inspect.signature(constructor)
        *own, last = signature.parameters.values()
        (options,) = get_args(get_type_hints(constructor)[last.name])
        names = list(get_type_hints(options))
        added = [inherited[name] for name in names]
        constructor.__annotations__ |= {name: types[name] for name in names}
        constructor.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own, *added]
        )
        return constructor

    return decorate
