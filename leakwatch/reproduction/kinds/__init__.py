"""The kinds of experiment: one file each, and one line here."""

from __future__ import annotations

from leakwatch.reproduction.kinds.base import register
from leakwatch.reproduction.kinds.correlation import Correlations
from leakwatch.reproduction.kinds.exposure import Exposure
from leakwatch.reproduction.kinds.final_losses import FinalLosses

register("correlation", Correlations)
register("exposure", Exposure)
register("final_losses", FinalLosses)
