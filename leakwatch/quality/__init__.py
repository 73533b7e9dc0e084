"""How good a reconstruction is: pixel errors, SSIM, LPIPS, FSIM, and baselines.

``api`` measures, ``metrics`` lists what it can, ``structural`` and ``perceptual`` hold
the longer ones; ``assignment`` finds which reconstruction shows which image.
"""

from __future__ import annotations

from leakwatch.quality.api import PixelUnits, in_pixels, quality
from leakwatch.quality.assignment import align, assign
from leakwatch.quality.baselines import BASELINES, best_constant, mean_image
from leakwatch.quality.metrics import DEFAULT_METRICS, METRICS, Metric, check_metrics
from leakwatch.quality.perceptual import LpipsUnavailableError
from leakwatch.quality.result import QualityResult

__all__ = [
    "BASELINES",
    "DEFAULT_METRICS",
    "METRICS",
    "LpipsUnavailableError",
    "Metric",
    "PixelUnits",
    "QualityResult",
    "align",
    "assign",
    "best_constant",
    "check_metrics",
    "in_pixels",
    "mean_image",
    "quality",
]
