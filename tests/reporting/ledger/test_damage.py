"""What is not as it was written is never read in silence."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from leakwatch.reporting import LedgerWarning, RiskLedger, Row, write_report
from leakwatch.reporting.ledger import ledger as ledger_module
from leakwatch.reporting.ledger.storage import encode_arrays


def fill(directory: Path, steps: int = 3) -> list[Row]:
    ledger = RiskLedger(directory, run="r")
    ledger.write_metadata({"config": {"noise_std": 1e-4}, "notes": ["a", "b"]})
    rows = []
    for epoch in range(steps):
        part = [Row(epoch, 10 * epoch, s, 1, "i2f_psnr", 20.5 + s) for s in range(3)]
        ledger.append(part, {"eigenvalues": np.ones((3, 2)), "epoch": epoch})
        rows += part
    return rows


def read(directory: Path) -> tuple[list[Row], list[str]]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ledger = RiskLedger.open(directory)
        ledger.read_metadata()
        rows = ledger.rows()
        ledger.spectra()
        ledger.attacks()
        ledger.read_probes()
    assert [str(w.message) for w in said] == list(ledger.problems)
    return rows, [str(w.message) for w in said]


def test_a_whole_record_gives_no_word(tmp_path: Path) -> None:
    rows = fill(tmp_path)
    assert read(tmp_path) == (rows, [])


@pytest.mark.parametrize("file", ["ledger/part-000001.csv", "run.json"])
def test_no_flipped_bit_is_silent(tmp_path: Path, file: str) -> None:
    rows = fill(tmp_path)
    path = tmp_path / file
    data, draw = path.read_bytes(), random.Random(0)
    before = RiskLedger(tmp_path).read_metadata()
    for _ in range(60):
        place = draw.randrange(len(data))
        changed = bytearray(data)
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        found, said = read(tmp_path)
        # Space between values is all that may differ unnoticed.
        if not said:
            assert RiskLedger(tmp_path).read_metadata() == before
            assert found == rows
        assert all(row in rows for row in found)


@pytest.mark.parametrize(("part", "left"), [(0, 6), (1, 6), (2, 6)])
def test_a_missing_part_is_named(tmp_path: Path, part: int, left: int) -> None:
    fill(tmp_path)
    (tmp_path / f"ledger/part-00000{part}.csv").unlink()
    rows, said = read(tmp_path)
    assert len(rows) == left
    (sentence,) = said
    assert f"part-00000{part}.csv is missing; 3 rows are not shown" in sentence


def test_a_changed_part_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = fill(tmp_path)
    part = tmp_path / "ledger" / "part-000001.csv"
    part.write_bytes(part.read_bytes().replace(b"21.5", b"12.5"))
    found, said = read(tmp_path)
    assert found == rows[:3] + rows[6:]
    assert "changed after it was written" in said[0]
    assert "3 rows are not shown" in said[0]


def test_damage_is_still_known_after_a_run_was_copied_and_cut_back(
    tmp_path: Path,
) -> None:
    fill(tmp_path / "old")
    part = tmp_path / "old/ledger/part-000000.csv"
    part.write_bytes(part.read_bytes().replace(b"21.5", b"12.5"))
    new = RiskLedger(tmp_path / "new", run="r")
    new.copy_from(tmp_path / "old", 2)
    new.write_metadata({})
    for ledger, position in ((new, 2), (RiskLedger(tmp_path / "old"), 1)):
        ledger.truncate(position)
        ledger.append([Row(9, 9, 0, 0, "i2f", 1.0)])
        found, said = read(ledger.directory)
        assert {row.epoch for row in found} == ({1, 9} if position == 2 else {9})
        assert len(said) == 1
        assert "part-000000.csv is ignored" in said[0]


def test_a_part_whose_hash_a_kill_prevented_counts_and_is_listed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = fill(tmp_path, 2)
    killed = RiskLedger(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(ledger_module.RunFile, "list", lambda *_: None)
        killed.append(rows[:3])
    assert read(tmp_path) == (rows + rows[:3], [])
    RiskLedger(tmp_path).append(rows[3:])
    (tmp_path / "ledger/part-000002.csv").unlink()
    assert "part-000002.csv is missing; 3 rows" in read(tmp_path)[1][0]


def test_a_record_without_hashes_is_read_as_it_is(tmp_path: Path) -> None:
    rows = fill(tmp_path)
    content = json.loads((tmp_path / "run.json").read_text())
    del content["files"], content["checksum"]  # as written by an older version
    (tmp_path / "run.json").write_text(json.dumps(content))
    assert read(tmp_path) == (rows, [])
    (tmp_path / "ledger/part-000001.csv").unlink()
    assert "part-000001.csv is missing" in read(tmp_path)[1][0]


@pytest.mark.parametrize("depth", [40, 900, 100_000])
@pytest.mark.parametrize("brackets", ["[]", '{"a":}'])
def test_deeply_nested_metadata(tmp_path: Path, depth: int, brackets: str) -> None:
    fill(tmp_path)
    inner = "1" if brackets == "[]" else '{"a":1}'
    text = brackets[:-1] * depth + inner + brackets[-1] * depth
    (tmp_path / "run.json").write_text('{"config": ' + text + "}")
    rows, said = read(tmp_path)
    assert len(rows) == 9
    assert "nested" in said[0]
    with pytest.warns(LedgerWarning, match="nested"):
        write_report(tmp_path)


PICTURES = np.zeros((2, 3, 3, 1), np.uint8)
OF_TWO: dict[str, npt.ArrayLike] = {"sample": [1, 2], "class": [0, 0], "epoch": 0}


@pytest.mark.parametrize(
    ("file", "arrays"),
    [
        ("attacks", {**OF_TWO, "step": 0, "original": PICTURES[:1]}),
        ("attacks", {**OF_TWO, "step": 0, "original": PICTURES[..., 0]}),
        ("attacks", {**OF_TWO, "step": 0, "original": PICTURES.astype(float)}),
        ("attacks", {**OF_TWO, "step": 0, "original": PICTURES.repeat(2, axis=3)}),
        ("attacks", {**OF_TWO, "step": 0, "near": PICTURES, "random": PICTURES[:, 1:]}),
        ("attacks", {**OF_TWO, "step": [0, 1], "original": PICTURES}),
        ("attacks", {**OF_TWO, "original": PICTURES}),
        ("attacks", {"original": PICTURES, "epoch": 0, "step": 0}),
        ("spectra", {**OF_TWO, "eigenvalues": np.ones(2)}),
        ("spectra", {**OF_TWO, "eigenvalues": np.ones((3, 2))}),
        ("spectra", {**OF_TWO, "eigenvalues": np.array([["a"], ["b"]])}),
        ("spectra", {**OF_TWO, "eigenvalues": np.ones((2, 2)) * 1j}),
        ("spectra", {"epoch": "first", "eigenvalues": np.ones((2, 2))}),
        ("spectra", {"epoch": [[3]], "eigenvalues": np.ones((2, 2))}),
        ("probes", {"pixels": PICTURES, "index": [1], "label": [0, 0]}),
        ("probes", {"pixels": PICTURES, "index": [[1], [2]], "label": [0, 0]}),
        ("probes", {"pixels": PICTURES, "index": ["a", "b"], "label": [0, 0]}),
        ("probes", {"pixels": PICTURES[0], "index": [1, 2], "label": [0, 0]}),
        ("probes", {"pixels": PICTURES}),
    ],
)  # fmt: skip
def test_odd_arrays_are_left_out(
    tmp_path: Path, file: str, arrays: Mapping[str, Any]
) -> None:
    ledger = RiskLedger(tmp_path)
    verdict = Row(0, 0, 1, 0, "audit/near/verdict", 1.0)
    ledger.append([verdict, Row(0, 0, 1, 0, "i2f_psnr", 20.0)])
    name = "probes.npz" if file == "probes" else f"{file}/part-000000.npz"
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(encode_arrays(arrays))
    rows, said = read(tmp_path)
    assert len(rows) == 2
    (sentence,) = said
    assert name in sentence
    assert "is ignored: " in sentence
    with pytest.warns(LedgerWarning, match="is ignored"):
        write_report(tmp_path)
