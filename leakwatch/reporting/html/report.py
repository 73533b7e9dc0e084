"""One HTML file that shows a recorded run: no server, no account, no network."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from leakwatch.reporting.figures.risk import risk_over_epochs, time_spent
from leakwatch.reporting.figures.spectrum import eigenvalue_histogram, spectrum_by_rank
from leakwatch.reporting.html.attacks import make_attack_lead, make_attacks, unexplained
from leakwatch.reporting.html.conclusions import conclude
from leakwatch.reporting.html.markup import (
    Panel,
    data_uri,
    make_panel,
    make_panels,
    thumbnail,
)
from leakwatch.reporting.html.notices import make_notices
from leakwatch.reporting.html.page import Link, render_page, write_library
from leakwatch.reporting.html.samples import make_sample_table
from leakwatch.reporting.html.summary import make_cards, make_lead, make_strip
from leakwatch.reporting.html.tables import (
    make_about,
    make_classes,
    make_glossary,
    make_layers,
)
from leakwatch.reporting.ledger.ledger import RiskLedger
from leakwatch.reporting.ledger.storage import write_atomically
from leakwatch.reporting.ledger.table import LedgerTable
from leakwatch.reporting.quantities import ACHIEVED, LAYERS
from leakwatch.reporting.run_facts import RunFacts
from leakwatch.reporting.statistics.headline import find_headline
from leakwatch.reporting.statistics.runs import audits_beside
from leakwatch.reporting.words import count, moment_words

__all__ = ["write_report"]

# Characters; a picture of a photograph takes about 5,000.
_MOST_PICTURES: Final = 400_000
# Pixels a side, of pictures in the table of samples.
_SMALL: Final = 48


class Section(NamedTuple):
    """A section; without content it is left out.

    Its template has the name of the anchor.
    """

    anchor: str
    title: str
    content: object


class Spectra(NamedTuple):
    """Figures of eigenvalues, and what the message is called."""

    noun: str
    figures: tuple[Panel, ...]


def write_report(
    run_dir: str | Path, *, shared: bool = False, live: bool = False
) -> Path:
    """Write ``report.html`` into a run directory and return its path.

    The file holds everything, plotly.js and the probes' pictures included, and
    replaces an older report atomically. Values without a usable status appear as
    their status word.

    Args:
        run_dir: Directory of a `leakwatch.reporting.ledger.ledger.RiskLedger`.
        shared: Whether to put plotly.js, 1.5 MB, into a file beside the report,
            instead of 0.7 MB into it.
        live: Whether training goes on: the page says so, and an open one reads itself
            again every 30 seconds, at the place where its reader is.

    Raises:
        FileNotFoundError: If there is no recorded run.
        ModuleNotFoundError: If plotly or Jinja2 is not installed.
    """
    ledger = RiskLedger.open(run_dir)
    path = ledger.directory / "report.html"
    page = _render(ledger, shared, live)
    if shared:
        write_library(ledger.directory)
    write_atomically(path, page.encode("utf-8", errors="backslashreplace"))
    return path


def _render(ledger: RiskLedger, shared: bool, live: bool) -> str:
    metadata = ledger.read_metadata()
    facts = RunFacts.of(metadata)
    everything = LedgerTable.from_rows(ledger.rows())
    # Attacks and layers have sections of their own; tables of scores stay readable.
    table = everything.where(lambda name: not name.startswith(("audit/", LAYERS)))
    # But what they achieved is what a reader of an audit came for.
    shown = everything.where(lambda name: name in ACHIEVED or name in table.quantities)
    pictures = _pictures(ledger)
    headline = find_headline(table)
    # What leads the page leads every figure and table of it.
    lead = "" if headline is None else headline.quantity
    noun = facts.message.noun
    risk = risk_over_epochs(
        shown,
        facts.quantities,
        facts.class_names,
        noise_std=facts.noise_std,
        floor=facts.floor,
        lead=lead,
    )
    attacks = make_attacks(everything, ledger.attacks(), facts)
    samples = make_sample_table(table, facts, pictures, lead)
    glossary = make_glossary(everything, facts.quantities)
    sections = [
        Section("attacks", "What attacks achieved", attacks),
        Section("training", "During training", make_panel("fig-risk", risk)),
        Section("classes", "By class", make_classes(shown, table, facts, lead)),
        Section("samples", "Samples", samples),
        Section("spectrum", f"What the {noun} sees", _spectra(ledger, noun)),
        Section("layers", "Which layer leaks", make_layers(everything)),
        Section("time", "Cost", make_panel("fig-time", time_spent(table))),
        Section("glossary", "Glossary", glossary),
        Section("limits", "What these numbers do not say", facts.message),
        Section("about", "About this run", make_about(metadata, table)),
    ]
    sections = [section for section in sections if section.content]
    title = facts.model or ledger.run or "training run"
    run = ledger.run if facts.model else ""
    return render_page(
        "report.html.j2",
        title=f"leakwatch: {', '.join(filter(None, (title, run)))}",
        heading=facts.message.heading.format(model=title),
        about=_about_line(table, metadata, run),
        links=[Link(section.anchor, section.title) for section in sections],
        lead=make_lead(table, headline, facts),
        attacked=make_attack_lead(everything),
        conclusions=conclude(
            everything, headline, facts, metadata, audits_beside(ledger)
        ),
        care=_sentences(*facts.training, *facts.assumed, unexplained(everything)),
        summary=make_cards(table, headline, facts, pictures),
        strip=make_strip(headline, facts),
        notices=make_notices(
            table, ledger.problems, facts.notes, private=bool(pictures)
        ),
        sections=sections,
        shared=shared,
        live=live,
    )


def _sentences(*texts: str) -> str:
    return " ".join(f"{text[0].upper()}{text[1:]}." for text in texts if text)


def _spectra(ledger: RiskLedger, noun: str) -> Spectra | None:
    spectra = ledger.spectra()
    figures = make_panels(
        ("fig-spectrum", spectrum_by_rank(spectra)),
        ("fig-histogram", eigenvalue_histogram(spectra)),
    )
    return Spectra(noun, figures) if figures else None


def _about_line(table: LedgerTable, metadata: Mapping[str, Any], run: str) -> str:
    columns = table.columns.values()
    samples = {sample for column in columns for sample in column.samples}
    classes = {label for column in columns for label in column.labels} - {None}
    parts = [
        f"run {run}" if run else "",
        count(len(samples), "watched sample") if samples else "",
        f"{len(classes)} {'class' if len(classes) == 1 else 'classes'}"
        if classes
        else "",
        count(len(table.moments), "probe step")
        if table.moments
        else "no probe step yet",
        f"the latest: {moment_words(table.moments[-1])}" if table.moments else "",
        f"started {_date(metadata['created'])}" if metadata.get("created") else "",
    ]
    return " · ".join(filter(None, parts))


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
    shown: dict[int, str] = {}
    left = _MOST_PICTURES
    for sample, pixels in zip(probes["index"], probes["pixels"], strict=False):
        picture = data_uri(thumbnail(pixels, _SMALL))
        left -= len(picture)
        if left < 0:
            break
        shown[int(sample)] = picture
    return shown
