"""One HTML file that shows several recorded runs side by side."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from leakwatch.reporting.figures.runs import (
    classes_of_runs,
    runs_over_epochs,
    samples_of_runs,
)
from leakwatch.reporting.html.markup import (
    Badge,
    NumberCell,
    data_uri,
    make_panel,
    make_panels,
    sort_key,
    thumbnail,
)
from leakwatch.reporting.html.page import Link, render_page, write_library
from leakwatch.reporting.html.tables import flatten
from leakwatch.reporting.ledger.storage import write_atomically
from leakwatch.reporting.statistics.achieved import KINDS
from leakwatch.reporting.statistics.runs import RecordedRun, incomparable, read_runs
from leakwatch.reporting.words import (
    CLEARLY_ABOVE,
    NO_RANKS,
    count,
    decibels,
    least,
    moment_words,
    psnr_level,
    sign_of_bound,
)

__all__ = ["write_comparison"]

_MOST_SAMPLES: Final = 60
_MOST_SETTINGS: Final = 60
_UNKNOWN: Final = NumberCell(badge=Badge("not known", "bad"), sort="")
# What differs between any two runs, and says nothing.
_OWN: Final = ("run", "created", "probes_fingerprint", "files", "notes", "training")


class RunRow(NamedTuple):
    """A run: its name, the address of its report (may be empty), and its cells."""

    label: str
    report: str
    model: str
    when: str
    cells: tuple[NumberCell, ...]
    attacks: str


class SampleRow(NamedTuple):
    """A sample that all runs watched; its picture may be empty; a cell for each run."""

    sample: int
    name: str
    picture: str
    cells: tuple[NumberCell, ...]


def write_comparison(
    run_dirs: Sequence[str | Path], path: str | Path, *, shared: bool = False
) -> Path:
    """Write a page that shows runs side by side, and return its path.

    Args:
        run_dirs: Directories of `leakwatch.reporting.RiskLedger`, two or more.
        path: Of the HTML file; its directory must exist.
        shared: Whether to put plotly.js into a file beside the page.

    Raises:
        FileNotFoundError: If one of them is no run.
        ValueError: For fewer than two runs.
        ModuleNotFoundError: If plotly or Jinja2 is not installed.
    """
    runs = read_runs(run_dirs)
    if len(runs) < 2:
        raise ValueError(f"a comparison takes two runs or more, got {len(runs)}.")
    where = Path(path)
    page = _render(runs, where.parent, shared)
    if shared:
        write_library(where.parent)
    write_atomically(where, page.encode("utf-8", errors="backslashreplace"))
    return where


def _render(runs: Sequence[RecordedRun], folder: Path, shared: bool) -> str:
    figures = make_panels(
        ("fig-runs", runs_over_epochs(runs)),
        ("fig-samples", samples_of_runs(runs)),
    )
    classes = make_panel("fig-classes", classes_of_runs(runs), tall=True)
    samples = _samples(runs)
    settings = _settings(runs)
    links = [
        Link("runs", "Runs"),
        Link("classes", "By class") if classes else None,
        Link("samples", "Samples") if samples else None,
        Link("settings", "What differs") if settings else None,
    ]
    return render_page(
        "runs.html.j2",
        title=f"leakwatch: {count(len(runs), 'run')}",
        heading=f"{count(len(runs), 'run')} side by side",
        about=" · ".join(run.label for run in runs),
        links=[link for link in links if link is not None],
        lead=" ".join(_lead(runs)),
        care=incomparable(runs),
        above=f"over {CLEARLY_ABOVE:g} dB",
        rows=[_row(run, folder) for run in runs],
        figures=figures,
        classes=classes,
        labels=[run.label for run in runs],
        samples=samples[:_MOST_SAMPLES],
        more=max(len(samples) - _MOST_SAMPLES, 0),
        settings=settings[:_MOST_SETTINGS],
        more_settings=max(len(settings) - _MOST_SETTINGS, 0),
        shared=shared,
    )


def _lead(runs: Sequence[RecordedRun]) -> Iterator[str]:
    known = [run for run in runs if math.isfinite(run.worst)]
    unknown = [run.label for run in runs if run not in known]
    if known:
        most, last = known[0], known[-1]
        bounds = [run.label for run in known if run.bound]
        if bounds:
            for run in dict.fromkeys((most, last)):
                yield f"{run.label}: {_words(run)}."
            yield f"Which exposes most is not known ({', '.join(bounds)}): {NO_RANKS}."
        else:
            yield f"{most.label} exposes most: {_words(most)}."
            if last is not most:
                yield f"{last.label} exposes least: {_words(last)}."
    if unknown:
        yield f"Not known, which is not safe: {', '.join(unknown)}."


def _words(run: RecordedRun) -> str:
    assert run.headline is not None
    summary = run.headline.summary
    return (
        f"{least(decibels(summary.worst), run.bound, summary.worst_estimated)} "
        "predicted for its most exposed sample, "
        f"{least(decibels(summary.median), run.bound, summary.median_estimated)} "
        "for the typical one"
    )


def _row(run: RecordedRun, folder: Path) -> RunRow:
    report = run.ledger.directory / "report.html"
    address = ""
    if report.is_file():
        # A relative address keeps working where the folder is moved as a whole.
        address = quote(Path(os.path.relpath(report, folder)).as_posix())
    headline = run.headline
    cells = (_UNKNOWN,) * 5
    if headline is not None:
        summary = headline.summary
        cells = (
            _decibels(summary.worst, run.bound, summary.worst_estimated),
            _decibels(summary.median, run.bound, summary.median_estimated),
            _change(headline.change, headline.probes),
            NumberCell(
                sign_of_bound(
                    f"{headline.clearly} of {summary.used}",
                    run.bound and headline.clearly < summary.used,
                ),
                sort=sort_key(headline.clearly / max(summary.used, 1)),
            ),
            NumberCell(
                str(summary.count - summary.used),
                sort=str(summary.count - summary.used),
            ),
        )
    return RunRow(
        label=run.label,
        report=address,
        model=run.facts.model or "–",
        when="–" if headline is None else moment_words(headline.moment),
        cells=(*cells, _cost(run)),
        attacks="; ".join(
            f"{KINDS[kind].partition(' (')[0]}: {outcome}"
            for kind, outcome in run.attacks.items()
        )
        or "none was run",
    )


def _decibels(value: float, bound: bool, estimated: bool) -> NumberCell:
    if math.isnan(value):
        return _UNKNOWN
    text = sign_of_bound(decibels(value), bound, estimated=estimated)
    return NumberCell(text, sort=sort_key(value), level=psnr_level(value))


def _change(value: float, probes: int) -> NumberCell:
    if math.isnan(value):
        return NumberCell("one probe" if probes == 1 else "not known", sort="")
    sign = "+" if value >= 0 else "−"
    return NumberCell(f"{sign}{decibels(abs(value))}", sort=sort_key(value))


def _cost(run: RecordedRun) -> NumberCell:
    shares = [
        row.value for row in run.table.of_run("time_fraction").values() if row.usable
    ]
    if not shares:
        return NumberCell("–", sort="")
    return NumberCell(f"{shares[-1]:.1%}", sort=sort_key(shares[-1]))


def _samples(runs: Sequence[RecordedRun]) -> list[SampleRow]:
    """The samples that all runs watched, the most exposed in any of them first."""
    if "samples" in incomparable(runs) or any(run.headline is None for run in runs):
        return []
    columns = [run.headline.column for run in runs if run.headline is not None]
    first = runs[0]
    kept = first.ledger.read_probes()
    grey_or_rgb = kept is not None and kept["pixels"].shape[3] in (1, 3)
    pixels = (
        dict(zip(kept["index"].tolist(), kept["pixels"], strict=True))
        if kept is not None and grey_or_rgb
        else {}
    )

    def exposure(sample: int) -> float:
        values = [column.at(sample) for column in columns]
        if not all(value.usable for value in values):
            return math.inf
        return max(value.value for value in values)

    rows: list[SampleRow] = []
    labels = dict(zip(columns[0].samples, columns[0].labels, strict=True))
    for sample in sorted(labels, key=exposure, reverse=True):
        shown = sample in pixels and len(rows) < _MOST_SAMPLES
        values = [column.at(sample) for column in columns]
        rows.append(
            SampleRow(
                sample,
                first.facts.class_label(labels[sample]),
                data_uri(thumbnail(pixels[sample], 48)) if shown else "",
                tuple(
                    _decibels(v.value if v.usable else math.nan, v.bound, v.estimated)
                    for v in values
                ),
            )
        )
    return rows


def _settings(runs: Sequence[RecordedRun]) -> list[tuple[str, tuple[str, ...]]]:
    """Entries of ``run.json`` that are not the same in all runs."""
    hidden = (*_OWN, "quantities", "class_names")
    each = [
        dict(flatten({k: v for k, v in run.metadata.items() if k not in hidden}))
        for run in runs
    ]
    keys = dict.fromkeys(key for entries in each for key in entries)
    rows = ((key, tuple(entries.get(key, "–") for entries in each)) for key in keys)
    return [(key, values) for key, values in rows if len(set(values)) > 1]
