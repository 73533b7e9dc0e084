"""What can be said about a reconstruction, which way is better, and who defined it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, final

from leakwatch.names import meant

__all__ = ["DEFAULT_METRICS", "METRICS", "Metric", "check_metrics"]


@final
@dataclass(frozen=True)
class Metric:
    """One measure of quality.

    Attributes:
        name: key in results, ledger and logs.
        higher_is_better: whether larger means closer to the original.
        unit: in words, empty for a plain number.
        images_only: whether it needs samples of shape (channels, height, width).
        meaning: one sentence for people who have not read the papers.
        source: who defined it and what computes it.
    """

    name: str
    higher_is_better: bool
    unit: str
    images_only: bool
    meaning: str
    source: str

    @property
    def direction(self) -> str:
        """The same in the words of the scores: a good picture is an exposed sample."""
        return f"{'higher' if self.higher_is_better else 'lower'} = more exposed"


_LPIPS = "Zhang et al., CVPR 2018, version 0.1, {} features (package lpips)"
_ALL = (
    Metric(
        "mse", False, "pixel²", False, "Mean squared error of the pixels.", "definition"
    ),
    Metric(
        "rmse", False, "pixel", False, "Root of the mean squared error.", "definition"
    ),
    Metric(
        "psnr",
        True,
        "dB",
        False,
        "Squared error against the data range, logarithmic: 10 log₁₀(range²/mse).",
        "definition, with the ceiling of the arithmetic",
    ),
    Metric(
        "ssim",
        True,
        "",
        True,
        "Similarity of brightness, contrast and structure in small windows; 1: equal.",
        "Wang et al., IEEE TIP 2004 (torchmetrics)",
    ),
    Metric(
        "lpips_vgg",
        False,
        "",
        True,
        "Difference that people would see, from the features of a VGG16 network.",
        _LPIPS.format("VGG16"),
    ),
    Metric(
        "lpips_alex",
        False,
        "",
        True,
        "Difference that people would see, from the features of an AlexNet.",
        _LPIPS.format("AlexNet"),
    ),
    Metric(
        "lpips_squeeze",
        False,
        "",
        True,
        "Difference that people would see, from the features of a SqueezeNet 1.1.",
        _LPIPS.format("SqueezeNet 1.1"),
    ),
    Metric(
        "fsim",
        True,
        "",
        True,
        "Similarity of edges and of the places that the eye attends to; 1: equal.",
        "Zhang et al., IEEE TIP 2011 (package piq)",
    ),
)

#: All metrics by name.
METRICS: Final[dict[str, Metric]] = {metric.name: metric for metric in _ALL}

#: Those that need no weights and no extra package.
DEFAULT_METRICS: Final = ("mse", "rmse", "psnr", "ssim")


def check_metrics(names: object) -> tuple[str, ...]:
    """The names as a tuple, each once, in order.

    Raises:
        TypeError: for anything but names.
        ValueError: for an unknown name or none at all; lists what there is.

    Example:
        >>> check_metrics(["psnr", "ssim", "psnr"])
        ('psnr', 'ssim')
    """
    if isinstance(names, str):
        names = (names,)
    if not isinstance(names, Iterable) or not all(isinstance(n, str) for n in names):
        raise TypeError(
            f"metrics must be names such as ['mse', 'psnr'], got {names!r}."
        )
    chosen: tuple[str, ...] = tuple(dict.fromkeys(names))
    unknown = [name for name in chosen if name not in METRICS]
    if unknown or not chosen:
        what = f"unknown metric {unknown[0]!r}" if unknown else "no metric asked for"
        near = meant(unknown[0], METRICS) if unknown else ""
        raise ValueError(f"{what}; {near}there are {', '.join(METRICS)}.")
    return chosen
