"""The tables and figures of four papers, by one command each.

An experiment is a YAML file in ``configs/experiments/``: paper, table, claim, and its
settings at two scales. Its kind (``kinds/``) says what is measured; ``run`` trains the
networks, computes the cells and writes the result beside the paper's numbers
(``published/``).
"""

from __future__ import annotations

from leakwatch.reproduction.experiment import Experiment, names, read
from leakwatch.reproduction.result import Result
from leakwatch.reproduction.run import Estimate, estimate, reproduce

__all__ = ["Estimate", "Experiment", "Result", "estimate", "names", "read", "reproduce"]
