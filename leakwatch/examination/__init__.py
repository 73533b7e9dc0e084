"""What can be trusted about a module's derivatives, found out once, on two samples."""

from __future__ import annotations

from leakwatch.examination.examine import Path, examine
from leakwatch.examination.watching import refuse_stray_reads

__all__ = ["Path", "examine", "refuse_stray_reads"]
