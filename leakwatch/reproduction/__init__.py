"""The tables and figures of four papers, by one command each.

An experiment is a YAML file in ``configs/experiments/``: paper, table, claim, and its
settings at two scales. Its kind (``kinds/``) says what is measured; ``run`` trains the
networks, computes the cells and writes the result beside the paper's numbers
(``published/``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from leakwatch.reproduction.experiment import Experiment, names, read
from leakwatch.reproduction.result import Result

if TYPE_CHECKING:
    from leakwatch.reproduction.run import Estimate, estimate, reproduce

__all__ = ["Estimate", "Experiment", "Result", "estimate", "names", "read", "reproduce"]


def __getattr__(name: str) -> Any:
    # At first use: a list of experiments should not wait for PyTorch.
    if name in __all__:
        return getattr(import_module("leakwatch.reproduction.run"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
