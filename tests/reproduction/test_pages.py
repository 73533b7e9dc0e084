"""The pages in docs/reproduction say what the result files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from leakwatch.reproduction import Result, names, read
from leakwatch.reproduction.pages import RESULTS, collect, write_pages, written
from leakwatch.reproduction.result import Entry, mark

DOCS = Path(__file__).parents[2] / "docs" / "reproduction"


def test_pages_and_result_files_agree() -> None:
    for path, text in written(DOCS).items():
        assert path.read_text("utf-8") == text, (
            f"{path.name} is behind; run `leakwatch reproduce pages`"
        )


def test_every_experiment_has_a_section() -> None:
    text = "".join(path.read_text("utf-8") for path in DOCS.glob("*.md"))
    assert [name for name in names() if f"<!-- {name} -->" not in text] == []


def test_every_result_is_that_of_an_experiment_at_small_scale() -> None:
    for path in (DOCS / RESULTS).glob("*.json"):
        result = Result.read(path)
        assert (result.experiment, result.scale) == (path.stem, "small")
        known = {(e.row, e.column, e.part) for e in result.entries}
        assert known >= set(read(path.stem).headline)


def entry(value: float, low: float | None, high: float | None) -> Entry:
    return Entry("r", "c", "p", value, low, high, 10)


@pytest.mark.parametrize(
    ("ours", "paper", "signed", "level"),
    [
        (entry(0.5, 0.3, 0.6), 0.4, "=", "="),
        (entry(0.5, 0.3, 0.6), 0.9, "≈", "↓"),
        (entry(0.5, 0.3, 0.6), -0.4, "≠", "↑"),
        (entry(0.1, -0.1, 0.2), 0.15, "~", "="),
        (entry(0.1, -0.1, 0.2), 0.6, "0", "↓"),
        (entry(0.1, None, None), 0.6, "?", "?"),
    ],
)
def test_marks(ours: Entry, paper: float, signed: str, level: str) -> None:
    assert mark(ours, paper, "sign") == signed
    assert mark(ours, paper, "level") == level


def test_a_page_is_filled_and_summed_up(tmp_path: Path) -> None:
    docs, output = tmp_path / "docs", tmp_path / "output"
    docs.mkdir()
    page, index = docs / "lavp.md", docs / "index.md"
    page.write_text(
        "# L\n\n**Verdict: the opposite.** Why.\n\n"
        "<!-- lavp-table-1 -->\nold\n<!-- /lavp-table-1 -->\nthe end\n"
    )
    index.write_text("<!-- summary -->\n<!-- /summary -->\n")
    result = Result(
        experiment="lavp-table-1",
        scale="small",
        versions={},
        data={"cifar10": "C-10"},
        networks={"lenet": 0.5},
        settings={},
        entries=(Entry("C-10+CS", "ang_min", "mse", -0.3, -0.4, -0.2, 300),),
        notes=("a note",),
        cells=({"cell": "x", "seconds": 60.0},),
    )
    result.save(output / "lavp-table-1-small")
    assert collect(output, docs) == ["lavp-table-1"]
    assert set(write_pages(docs)) == {page, index}
    text = page.read_text()
    assert "old" not in text
    assert text.endswith("<!-- /lavp-table-1 -->\nthe end\n")
    assert "| **C-10+CS** | -0.30* ≠ |" in text
    assert "| *paper: C-10+CS* | +0.64 |" in text
    assert "1 cells, 1.0 minutes" in text
    assert "| the opposite | C-10+CS, ang_min, mse: -0.30 [-0.40, -0.20] | 300 |" in (
        index.read_text()
    )
    assert "1 of 1 experiments: 1 cells and 0.0 hours of one CPU core" in (
        index.read_text()
    )
    assert write_pages(docs) == []


def test_a_result_without_a_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / RESULTS).mkdir()
    (tmp_path / RESULTS / "lavp-table-1.json").write_text("{}")
    with pytest.raises(ValueError, match="is no result of an experiment"):
        written(tmp_path)
    (tmp_path / "lavp.md").write_text("<!-- nothing -->\n<!-- /nothing -->\n")
    (tmp_path / RESULTS / "lavp-table-1.json").unlink()
    with pytest.raises(ValueError, match="names nothing, which is no experiment"):
        written(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        written(tmp_path / "missing")
