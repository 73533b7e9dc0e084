"""What an experiment found, beside what the paper says; as JSON, as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal, final

from leakwatch.reporting.ledger.storage import make_private_directory, write_atomically

__all__ = [
    "MARKS",
    "Compare",
    "Entry",
    "Panel",
    "Published",
    "Result",
    "Summary",
    "mark",
]

#: How ours and the paper's number are compared: correlations and differences by their
#: sign first, levels such as decibels by their size alone.
Compare = Literal["sign", "level"]

#: What stands behind a number of ours.
MARKS: Final = {
    "=": "the paper's number lies in our 95 % interval",
    "≈": "same sign, our interval excludes 0, another size",
    "≠": "the opposite sign, our interval excludes 0",
    "0": "our interval holds 0, and not the paper's number",
    "~": "our interval holds both 0 and the paper's number: undecided",
    "↑": "higher than the paper's",
    "↓": "lower than the paper's",
    "?": "no interval to compare by",
}


@final
@dataclass(frozen=True)
class Entry:
    """One number of a table, or one that belongs to a figure.

    Attributes:
        row: of the table.
        column: of the table.
        part: which of several numbers that stand in one place, such as ``"psnr"``.
        value: None where there is none.
        low: of the 95 % interval, None where there is none.
        high: the same.
        n: how many values it was computed from.
        status: what it is worth, as everywhere.
        decimals: that are printed; None: four digits, wherever they stand.
    """

    row: str
    column: str
    part: str
    value: float | None
    low: float | None = None
    high: float | None = None
    n: int = 0
    status: str = "ok"
    decimals: int | None = 2

    def text(self, signed: bool) -> str:
        """As a table shows it; an asterisk where the interval excludes 0."""
        if self.value is None:
            return "–"
        shown = plain(self.value, self.decimals, signed)
        return shown + "*" * (signed and clear(self))


def plain(value: float, decimals: int | None, signed: bool = False) -> str:
    """A number as tables show it.

    Args:
        value: the number.
        decimals: as of :class:`Entry`.
        signed: whether a plus is shown.

    Example:
        >>> plain(0.123, 2, signed=True), plain(4.7e5, None)
        ('+0.12', '4.7e+05')
    """
    form = ".4g" if decimals is None else f".{decimals}f"
    return f"{value:{'+' * signed}{form}}"


def clear(entry: Entry) -> bool:
    """Whether the interval excludes 0."""
    if entry.low is None or entry.high is None:
        return False
    return entry.low > 0 or entry.high < 0


@final
@dataclass(frozen=True)
class Panel:
    """One part of a figure.

    Attributes:
        title: above it.
        x: name of the horizontal axis.
        y: name of the vertical one.
        series: name → points, ``(xs, ys)``.
        log: axes that are logarithmic, such as ``"xy"``.
        lines: whether points are joined.
    """

    title: str
    x: str
    y: str
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    log: str = ""
    lines: bool = False


@final
@dataclass(frozen=True)
class Summary:
    """What a kind of experiment makes of its cells.

    Attributes:
        entries: the numbers.
        notes: sentences that the reader needs, such as how many attacks matched.
        panels: of a figure; none: a table.
    """

    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()
    panels: tuple[Panel, ...] = ()


@final
@dataclass(frozen=True)
class Published:
    """The numbers of a paper.

    Attributes:
        source: the paper.
        where: in it.
        values: row → column → part → number.
    """

    source: str
    where: str
    values: Mapping[str, Mapping[str, Mapping[str, float]]]

    @classmethod
    def read(cls, name: str) -> Published:
        """A data file that comes with the package.

        Args:
            name: without ``.json``.

        Raises:
            ValueError: there is none.
        """
        file = resources.files("leakwatch.reproduction") / f"published/{name}.json"
        try:
            content = json.loads(file.read_text("utf-8"))
        except FileNotFoundError:
            raise ValueError(f"there are no published numbers {name}.json.") from None
        parts = content["parts"]
        values = {
            row: {
                column: dict(zip(parts, numbers, strict=False))
                for column, numbers in columns.items()
            }
            for row, columns in content["values"].items()
        }
        return cls(content["source"], content["where"], values)

    def at(self, row: str, column: str, part: str) -> float | None:
        """The paper's number, or None."""
        return self.values.get(row, {}).get(column, {}).get(part)


@final
@dataclass(frozen=True)
class Result:
    """One experiment that was run.

    Attributes:
        experiment: its name.
        scale: at which.
        versions: of leakwatch and torch.
        data: what it ran on, in words.
        networks: place → accuracy on test images.
        settings: as the YAML file has them.
        entries: the numbers.
        notes: sentences.
        cells: each cell: what it is about, n, attacks that matched, CPU seconds.
        beside: row of ours → row of the paper that stands beside it.
        figure: whether it has one.
    """

    experiment: str
    scale: str
    versions: Mapping[str, str]
    data: Mapping[str, str]
    networks: Mapping[str, float]
    settings: Mapping[str, Any]
    entries: tuple[Entry, ...]
    notes: tuple[str, ...]
    cells: tuple[Mapping[str, Any], ...]
    beside: Mapping[str, str] = field(default_factory=dict)
    figure: bool = False

    @property
    def seconds(self) -> float:
        """CPU time of all cells and trainings."""
        return float(sum(cell["seconds"] for cell in self.cells))

    def save(self, directory: Path) -> Path:
        """Write result.json, whole or not at all."""
        make_private_directory(directory)
        path = directory / "result.json"
        text = json.dumps(asdict(self), allow_nan=False, ensure_ascii=False, indent=1)
        write_atomically(path, text.encode())
        return path

    @classmethod
    def read(cls, path: Path) -> Result:
        """What :meth:`save` has written.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is damaged.
        """
        try:
            content = json.loads(path.read_text("utf-8"))
            entries = tuple(Entry(**entry) for entry in content.pop("entries"))
            for name in ("notes", "cells"):
                content[name] = tuple(content[name])
            return cls(entries=entries, **content)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is no result of an experiment ({error}).") from (
                error
            )

    def table(self, compare: Compare, published: Published | None) -> str:
        """Rows and columns as in the paper, its numbers under ours, as Markdown.

        Args:
            compare: by what.
            published: the paper's numbers; None: there are none.
        """
        places = {(e.row, e.column, e.part): e for e in self.entries}
        rows = list(dict.fromkeys(e.row for e in self.entries))
        columns = list(dict.fromkeys(e.column for e in self.entries))
        parts = list(dict.fromkeys(e.part for e in self.entries))
        signed = compare == "sign"
        head = " / ".join(parts)
        lines = [f"| {head} | {' | '.join(columns)} |", "|---" * (len(columns) + 1)]
        lines[1] += "|"
        for row in rows:
            ours, theirs, any_theirs = [], [], False
            paper_row = self.beside.get(row, row)
            for column in columns:
                shown, said = [], []
                for part in parts:
                    entry = places.get((row, column, part))
                    paper = published and published.at(paper_row, column, part)
                    shown.append(_shown(entry, paper, signed, compare))
                    said.append("–" if paper is None else _number(paper, signed))
                    any_theirs |= paper is not None
                ours.append(" / ".join(shown) if set(shown) != {"–"} else "–")
                theirs.append(" / ".join(said) if set(said) != {"–"} else "–")
            lines.append(f"| **{row}** | {' | '.join(ours)} |")
            if any_theirs:
                lines.append(f"| *paper: {paper_row}* | {' | '.join(theirs)} |")
        return "\n".join(lines)

    def marks(self, compare: Compare, published: Published | None) -> dict[str, int]:
        """How often each mark stands in the table."""
        found: dict[str, int] = {}
        for e in self.entries:
            row = self.beside.get(e.row, e.row)
            paper = published and published.at(row, e.column, e.part)
            if paper is not None and e.value is not None:
                sign = mark(e, paper, compare)
                found[sign] = found.get(sign, 0) + 1
        return found


def mark(entry: Entry, paper: float, compare: Compare) -> str:
    """How our number agrees with the paper's, see :data:`MARKS`.

    Args:
        entry: ours, with a value.
        paper: the paper's.
        compare: by what.
    """
    value, low, high = entry.value, entry.low, entry.high
    assert value is not None
    if low is None or high is None:
        return "?"
    held = low <= paper <= high
    if compare == "sign" and not clear(entry):
        return "~" if held else "0"
    if held:
        return "="
    if compare == "level":
        return "↑" if value > paper else "↓"
    return "≈" if math.copysign(1, value) == math.copysign(1, paper) else "≠"


def _shown(
    entry: Entry | None, paper: float | None, signed: bool, compare: Compare
) -> str:
    if entry is None:
        return "–"
    text = entry.text(signed)
    if paper is None or entry.value is None:
        return text
    return f"{text} {mark(entry, paper, compare)}"


def _number(value: float, signed: bool) -> str:
    return f"{value:+.2f}" if signed else f"{value:g}"
