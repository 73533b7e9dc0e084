"""One HTML file that shows a recorded run: no server, no account, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from leakwatch.reporting.figures import layers as layer_section
from leakwatch.reporting.figures.classes import class_bars
from leakwatch.reporting.figures.risk import risk_over_epochs, time_spent
from leakwatch.reporting.figures.spectrum import eigenvalue_histogram, spectrum_by_rank
from leakwatch.reporting.html import attacks as attack_section
from leakwatch.reporting.html import notices as notices_section
from leakwatch.reporting.html import samples as sample_section
from leakwatch.reporting.html import summary
from leakwatch.reporting.html import tables as text_sections
from leakwatch.reporting.html.frame import html_page
from leakwatch.reporting.html.glossary import glossary
from leakwatch.reporting.html.markup import esc, figure_panel, section
from leakwatch.reporting.html.png import data_uri, thumbnail
from leakwatch.reporting.ledger.ledger import RiskLedger
from leakwatch.reporting.ledger.storage import write_atomically
from leakwatch.reporting.ledger.table import LedgerTable
from leakwatch.reporting.message import Message, message_from_metadata
from leakwatch.reporting.quantities import (
    ACHIEVED,
    class_names_from_metadata,
    quantities_from_metadata,
)
from leakwatch.reporting.run_facts import (
    assumed_from_metadata,
    floor_from_metadata,
    model_from_metadata,
    noise_from_metadata,
    notes_from_metadata,
)
from leakwatch.reporting.statistics.headline import find_headline
from leakwatch.reporting.words import count, moment_words

_MOST_PICTURES: Final = 1000


def write_report(run_dir: str | Path) -> Path:
    """Write ``report.html`` into a run directory and return its path.

    The file holds everything, plotly.js and the probes' pictures included, and
    replaces an older report atomically. Values without a usable status appear as
    their status word.

    Args:
        run_dir: Directory of a `leakwatch.reporting.ledger.ledger.RiskLedger`.

    Raises:
        FileNotFoundError: If there is no recorded run.
        ModuleNotFoundError: If plotly is not installed.
    """
    ledger = RiskLedger.open(run_dir)
    path = ledger.directory / "report.html"
    write_atomically(path, _render(ledger).encode("utf-8", errors="backslashreplace"))
    return path


def _render(ledger: RiskLedger) -> str:
    metadata = ledger.read_metadata()
    quantities = quantities_from_metadata(metadata)
    names = class_names_from_metadata(metadata)
    everything = LedgerTable.from_rows(ledger.rows())
    # Attacks and layers have sections of their own; tables of scores stay readable.
    table = everything.where(
        lambda name: not name.startswith(("audit/", layer_section.LAYERS))
    )
    # But what they achieved is what a reader of an audit came for.
    shown = everything.where(lambda name: name in ACHIEVED or name in table.quantities)
    found = bool(table.moments)
    spectra = ledger.spectra()
    pictures = _pictures(ledger)
    headline = find_headline(table)
    noise = noise_from_metadata(metadata)
    floor = floor_from_metadata(metadata)
    model = model_from_metadata(metadata)
    message = message_from_metadata(metadata)
    title = model or ledger.run or "training run"
    run = ledger.run if model else ""
    sections = {
        "attacks": (
            "What attacks achieved",
            attack_section.attack_section(
                everything, ledger.attacks(), names, message, quantities
            ),
        ),
        "training": (
            "During training",
            figure_panel(
                "fig-risk",
                risk_over_epochs(
                    shown, quantities, names, noise_std=noise, floor=floor
                ),
            ),
        ),
        "classes": (
            "By class",
            figure_panel("fig-class", class_bars(shown, quantities, names), tall=True)
            + text_sections.class_table(table, quantities, names)
            + text_sections.fairness_table(table, quantities, names),
        ),
        "samples": (
            "Samples",
            sample_section.sample_table(table, quantities, names, pictures),
        ),
        "spectrum": (
            f"What the {message.noun} sees",
            _spectrum(spectra, message),
        ),
        "layers": ("Which layer leaks", layer_section.layer_section(everything)),
        "time": ("Cost", figure_panel("fig-time", time_spent(table))),
        "glossary": ("Glossary", glossary(everything, quantities)),
        "limits": ("What these numbers do not say", text_sections.limits(message)),
        "about": ("About this run", text_sections.about(metadata, table)),
    }
    body = "\n".join(section(key, *content) for key, content in sections.items())
    links = "".join(
        f'<a href="#{key}">{esc(heading)}</a>'
        for key, (heading, content) in sections.items()
        if content
    )
    doubts = [*assumed_from_metadata(metadata), attack_section.unexplained(everything)]
    notices = notices_section.notices(
        table,
        ledger.problems,
        notes_from_metadata(metadata),
        private=bool(pictures),
    )
    return html_page(
        title=f"leakwatch: {', '.join(filter(None, (title, run)))}",
        heading=message.heading.format(model=title),
        about=_about_line(table, metadata, run),
        navigation=f'<nav aria-label="Sections">{links}</nav>',
        body=f"""{summary.lead(headline, noise, message) if found else _NOTHING}
{attack_section.attack_lead(everything)}
{summary.assumptions(doubts)}
{summary.cards(table, headline, names, pictures)}
{summary.strip(headline, names, floor)}
{notices}
<noscript><div class="notice">The figures need JavaScript, which is switched off;
the tables do not.</div></noscript>
{body}
<footer>Written by leakwatch from the ledger in this directory. The file is complete:
it opens without a network.</footer>""",
    )


_NOTHING: Final = (
    '<p class="lead">Nothing has been recorded yet: the first probe of this run has '
    "not finished.</p>"
)


def _spectrum(spectra: Sequence[Mapping[str, Any]], message: Message) -> str:
    panels = figure_panel("fig-spectrum", spectrum_by_rank(spectra))
    panels += figure_panel("fig-histogram", eigenvalue_histogram(spectra))
    if not panels:
        return ""
    return (
        '<p class="soft">Each eigenvalue of JᵀJ says how strongly one direction of the '
        f"input shows in the {message.noun}. Directions with large eigenvalues can be "
        "read off; those below the noise cannot.</p>"
        f'<div class="two">{panels}</div>'
    )


def _about_line(table: LedgerTable, metadata: Mapping[str, Any], run: str) -> str:
    samples = {s for column in table.columns.values() for s in column.samples}
    classes = {
        label
        for column in table.columns.values()
        for label in column.labels
        if label is not None
    }
    parts = [
        f"run {run}" if run else "",
        count(len(samples), "watched sample") if samples else "",
        f"{len(classes)} {'class' if len(classes) == 1 else 'classes'}"
        if classes
        else "",
        count(len(table.moments), "probe") if table.moments else "no probes yet",
        f"the last {moment_words(table.moments[-1])}" if table.moments else "",
        f"started {_date(metadata['created'])}" if metadata.get("created") else "",
    ]
    return " · ".join(part for part in parts if part)


def _date(created: object) -> str:
    try:
        when = datetime.fromisoformat(str(created))
    except ValueError:
        return str(created)
    return f"{when:%Y-%m-%d %H:%M} {when.tzname() or ''}".rstrip()


def _pictures(ledger: RiskLedger) -> dict[int, str]:
    """Return sample to the address that holds its picture; grey and RGB only."""
    probes = ledger.read_probes()
    if probes is None or probes["pixels"].ndim != 4 or not probes["pixels"].size:
        return {}
    if probes["pixels"].shape[3] not in (1, 3):
        return {}
    pairs = zip(probes["index"], probes["pixels"], strict=False)
    return {
        int(sample): data_uri(thumbnail(pixels))
        for place, (sample, pixels) in enumerate(pairs)
        if place < _MOST_PICTURES
    }
