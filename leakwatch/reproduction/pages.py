"""Results in documents: tables come from result files, judgements from people.

A page of ``docs/reproduction/`` has a section for each experiment: a heading, a line
``**Verdict: direction only.**`` with the reasons, and between two comments what this
module writes from ``results/NAME.json``. The index has a table of all of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from leakwatch.reporting.ledger.storage import write_atomically
from leakwatch.reproduction.experiment import Experiment, names, place_of, read
from leakwatch.reproduction.result import Entry, Result, plain
from leakwatch.reproduction.run import page

__all__ = ["RESULTS", "collect", "write_pages", "written"]

RESULTS: Final = "results"

_SECTION: Final = re.compile(
    r"(?P<before>.*?)<!-- (?P<name>[\w-]+) -->\n.*?<!-- /(?P=name) -->\n?", re.DOTALL
)
_VERDICT: Final = re.compile(r"\*\*Verdict: (.+?)\.?\*\*", re.DOTALL)
_SUMMARY: Final = "summary"


def collect(output: Path, docs: Path) -> list[str]:
    """Copy results at small scale, on the papers' data, to where pages find them.

    Args:
        output: folder of results, as ``leakwatch reproduce`` fills it.
        docs: folder of the pages.

    Returns:
        The experiments that were found.
    """
    found = []
    for name in names():
        place = place_of(name, "small", None, output)
        for file, ending in (("result.json", "json"), ("figure.png", "png")):
            source = place / file
            if source.is_file():
                target = docs / RESULTS / f"{name}.{ending}"
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(source.read_bytes())
                found.append(name)
    return list(dict.fromkeys(found))


def write_pages(docs: Path) -> list[Path]:
    """Write results into all pages.

    Args:
        docs: their folder, with ``results/``.

    Returns:
        The pages that changed.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: a page names an experiment that there is not, or a result stands in
            no page.
    """
    changed = []
    for path, text in written(docs).items():
        if path.read_text("utf-8") != text:
            write_atomically(path, text.encode())
            path.chmod(0o644)
            changed.append(path)
    return changed


def written(docs: Path) -> dict[Path, str]:
    """Every page as it should be.

    Args:
        docs: folder of the pages.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: as of :func:`write_pages`.
    """
    if not docs.is_dir():
        raise FileNotFoundError(f"there is no folder {docs}; give --docs.")
    results = {path.stem: Result.read(path) for path in (docs / RESULTS).glob("*.json")}
    pages, verdicts = {}, dict[str, _Judged]()
    paths = sorted(docs.glob("*.md"), key=lambda path: path.name == "index.md")
    for path in paths:
        text = path.read_text("utf-8")

        def fill(match: re.Match[str], path: Path = path) -> str:
            name = match["name"]
            if name == _SUMMARY:
                body = _summary(verdicts)
            elif name not in names():
                raise ValueError(f"{path} names {name}, which is no experiment.")
            else:
                judged = _Judged(path, read(name), _verdict(match), results.get(name))
                verdicts[name] = judged
                body = _body(judged, docs)
            return f"{match['before']}<!-- {name} -->\n{body}<!-- /{name} -->\n"

        pages[path] = _SECTION.sub(fill, text)
    if lost := sorted(set(results) - set(verdicts)):
        raise ValueError(f"no page of {docs} has a section for {', '.join(lost)}.")
    return pages


@final
@dataclass(frozen=True)
class _Judged:
    """An experiment with what a person says about it."""

    page: Path
    experiment: Experiment
    verdict: str
    result: Result | None


def _verdict(match: re.Match[str]) -> str:
    found = _VERDICT.findall(match["before"])
    return " ".join(found[-1].split()) if found else "not run"


def _body(judged: _Judged, docs: Path) -> str:
    experiment, result = judged.experiment, judged.result
    command = f"leakwatch reproduce {experiment.name}"
    claim = " ".join(experiment.claim.split())
    title = experiment.title + "." * (not experiment.title.endswith("?"))
    whose = "" if experiment.paper == "leakwatch" else "The paper: "
    parts = [f"*{title}* {whose}{claim}", f"```console\n{command}\n```"]
    if result is None:
        parts.append("Not run here.")
    else:
        figure = docs / RESULTS / f"{experiment.name}.png"
        if figure.is_file():
            parts.append(f"![{experiment.item}]({RESULTS}/{figure.name})")
        parts.append(page(experiment, result).strip())
    return "\n\n" + "\n\n".join(parts) + "\n\n"


def _summary(judged: dict[str, _Judged]) -> str:
    lines = ["", "| claim | verdict | our number | n |", "|---|---|---|---|"]
    for name in names():
        one = judged.get(name)
        if one is None:
            continue
        item = f"[{one.experiment.paper}, {one.experiment.item}]({one.page.name})"
        claim = " ".join(one.experiment.claim.split())
        numbers, n = "–", "–"
        if one.result is not None:
            shown = _headline(one.experiment, one.result)
            numbers = "; ".join(_words(e) for e in shown) or "–"
            n = str(max((e.n for e in shown), default="–"))
        lines.append(f"| {item}: {claim} | {one.verdict} | {numbers} | {n} |")
    return "\n".join([*lines, "", _cost(judged), "", ""])


def _cost(judged: dict[str, _Judged]) -> str:
    found = [one.result for one in judged.values() if one.result is not None]
    cells = sum(len(result.cells) for result in found)
    hours = sum(result.seconds for result in found) / 3600
    return (
        f"{len(found)} of {len(judged)} experiments: {cells:,} cells and "
        f"{hours:.1f} hours of one CPU core, where what several of them share counts "
        "for each."
    )


def _headline(experiment: Experiment, result: Result) -> list[Entry]:
    places = {(e.row, e.column, e.part): e for e in result.entries}
    return [e for place in experiment.headline if (e := places.get(place))]


def _words(entry: Entry) -> str:
    place = ", ".join(filter(None, (entry.row, entry.column, entry.part)))
    said = f"{place}: {entry.text(signed=False).rstrip('*')}"
    if entry.low is None or entry.high is None:
        return said
    low, high = (plain(end, entry.decimals) for end in (entry.low, entry.high))
    return f"{said} [{low}, {high}]"
