"""What can be trusted about a module's derivatives, found out once, on two samples."""

from __future__ import annotations

from leakwatch.derivatives.verification.forward_watch import (
    refuse_reads_outside_layers,
    refuse_stray_reads,
)
from leakwatch.derivatives.verification.known import known, remember
from leakwatch.derivatives.verification.verify import Examination, Path, examine

__all__ = [
    "Examination",
    "Path",
    "examine",
    "known",
    "refuse_reads_outside_layers",
    "refuse_stray_reads",
    "remember",
]
