"""Figures of the eigenvalue spectra that the ledger keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from leakwatch.reporting.figures import style
from leakwatch.reporting.ledger.table import Moment
from leakwatch.reporting.words import moment_words

_COLOURS: Final = (style.BLUE, style.ORANGE, style.PURPLE)
_DASHES: Final = ("solid", "dash", "dot")
_MOST_RANKS: Final = 300
_BINS: Final = 40

Spectra = Sequence[Mapping[str, npt.NDArray[Any]]]


def spectrum_by_rank(spectra: Spectra, *, height: int = 420) -> Any | None:
    """Draw eigenvalues against their rank, at the first, middle and last probe.

    Lines are medians over the samples, bands reach from the lowest to the highest
    sample. Values that are not positive, or lie below a sample's precision floor
    when ``floor`` was kept, are left out and counted.

    Args:
        spectra: What `leakwatch.reporting.ledger.ledger.RiskLedger.spectra` returns.
        height: Height in pixels.
    """
    chosen = _first_middle_last(spectra)
    if not chosen:
        return None
    figure = style.new_figure(
        "Spectrum of JᵀJ",
        _left_out(chosen),
        height,
    )
    for (moment, values), colour, dash in zip(chosen, _COLOURS, _DASHES, strict=False):
        seen = np.isfinite(values).any(axis=0)
        kept = np.flatnonzero(seen)
        if kept.size > _MOST_RANKS:
            kept = np.unique(
                kept[np.linspace(0, kept.size - 1, _MOST_RANKS).astype(int)]
            )
        ranks = (kept + 1).tolist()
        low, middle, high = (
            pick(values[:, kept], axis=0)
            for pick in (np.nanmin, np.nanmedian, np.nanmax)
        )
        words = moment_words(moment)
        fill = style.translucent(colour, 0.14)
        figure.add_traces(
            style.band(
                ranks, low, high, fillcolor=fill, legendgroup=words, showlegend=False
            )
        )
        figure.add_scatter(
            x=ranks,
            y=middle.tolist(),
            mode="lines" if len(ranks) > 1 else "markers",
            line={"color": colour, "width": 2.5, "dash": dash},
            name=words,
            legendgroup=words,
            customdata=np.stack([low, high], axis=1).tolist(),
            hovertemplate=(
                "rank %{x}: median %{y:.3g}<br>%{customdata[0]:.3g} to "
                "%{customdata[1]:.3g}<extra>%{fullData.name}</extra>"
            ),
        )
    figure.update_xaxes(title_text="rank of the eigenvalue", tickformat="d")
    figure.update_yaxes(
        title_text="eigenvalue<br><i>larger = direction better visible</i>",
        type="log",
        exponentformat="power",
    )
    return figure


def eigenvalue_histogram(spectra: Spectra, *, height: int = 420) -> Any | None:
    """Draw how eigenvalues spread over decades, at the first, middle and last probe.

    Args:
        spectra: What `leakwatch.reporting.ledger.ledger.RiskLedger.spectra` returns.
        height: Height in pixels.
    """
    chosen = _first_middle_last(spectra)
    if not chosen:
        return None
    figure = style.new_figure(
        "Distribution of the eigenvalues",
        "share of all eigenvalues of all samples, per bin",
        height,
    )
    logs = [np.log10(values[np.isfinite(values)]) for _, values in chosen]
    low, high = (float(pick(np.concatenate(logs))) for pick in (np.min, np.max))
    edges = np.linspace(low, high if high > low else low + 1.0, _BINS + 1)
    middles = (edges[:-1] + edges[1:]) / 2.0
    for (moment, _), log, colour, dash in zip(
        chosen, logs, _COLOURS, _DASHES, strict=False
    ):
        counts, _unused = np.histogram(log, bins=edges)
        figure.add_scatter(
            x=middles.tolist(),
            y=(counts / log.size).tolist(),
            mode="lines",
            line={"color": colour, "width": 2, "shape": "hvh", "dash": dash},
            fill="tozeroy",
            fillcolor=style.translucent(colour, 0.10),
            name=moment_words(moment),
            hovertemplate=(
                "log₁₀ λ ≈ %{x:.2f}: %{y:.1%}<extra>%{fullData.name}</extra>"
            ),
        )
    figure.update_xaxes(title_text="log₁₀ of the eigenvalue")
    figure.update_yaxes(title_text="share", tickformat=".1~%", rangemode="tozero")
    return figure


Kept = tuple[Moment, npt.NDArray[np.float64]]


def _first_middle_last(spectra: Spectra) -> list[Kept]:
    """Return up to three (moment, eigenvalues) with NaN where nothing is resolved."""
    kept: list[Kept] = []
    for arrays in spectra:
        values = np.array(arrays.get("eigenvalues", np.empty(0)), np.float64)
        if values.ndim != 2 or "epoch" not in arrays:
            continue
        limit = np.zeros((len(values), 1))
        floor = np.asarray(arrays.get("floor", np.empty(0)), np.float64)
        if floor.shape == (len(values),):
            limit = np.nan_to_num(floor, nan=0.0)[:, None]
        with np.errstate(invalid="ignore"):
            values[~(values > limit) | np.isinf(values)] = np.nan
        if np.isfinite(values).any():
            moment = Moment(_scalar(arrays["epoch"]), _scalar(arrays.get("step", 0)))
            kept.append((moment, values))
    kept.sort(key=lambda pair: pair[0])
    places = sorted({0, len(kept) // 2, len(kept) - 1}) if kept else []
    return [kept[place] for place in places]


def _scalar(array: Any) -> int:
    flat = np.asarray(array).reshape(-1)
    return int(flat[0]) if flat.size else 0


def _left_out(chosen: list[Kept]) -> str:
    total = sum(values.size for _, values in chosen)
    missing = total - sum(int(np.isfinite(values).sum()) for _, values in chosen)
    line = "median over the samples, band from lowest to highest"
    if missing:
        line += f"; {missing} of {total} values are unresolved and not drawn"
    return line
