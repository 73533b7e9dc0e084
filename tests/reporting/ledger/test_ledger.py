from __future__ import annotations

import json
import os
import stat
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from leakwatch.reporting import LedgerWarning, RiskLedger, Row
from leakwatch.reporting.ledger import storage
from leakwatch.reporting.ledger.run_file import SCHEMA_VERSION


def row(epoch: int, value: float = 1.0, quantity: str = "i2f") -> Row:
    return Row(epoch, 10 * epoch, 7, 1, quantity, value)


def fill(directory: Path, steps: int = 3) -> RiskLedger:
    ledger = RiskLedger(directory, run="r")
    for epoch in range(steps):
        ledger.append([row(epoch)], {"eigenvalues": np.ones((1, 2)), "epoch": epoch})
    return ledger


def test_nothing_is_created_before_the_first_write(tmp_path: Path) -> None:
    ledger = RiskLedger(tmp_path / "deep" / "leakwatch")
    assert ledger.position == 0
    assert ledger.rows() == []
    assert not (tmp_path / "deep").exists()


def test_append_writes_one_part_and_returns_the_position(tmp_path: Path) -> None:
    ledger = RiskLedger(tmp_path / "leakwatch", run="r")
    assert ledger.append([row(0), row(0, 2.0, "loss")]) == 1
    assert ledger.append([]) == 2
    assert ledger.append([row(2)]) == 3
    names = sorted(p.name for p in (tmp_path / "leakwatch" / "ledger").iterdir())
    assert names == ["part-000000.csv", "part-000001.csv", "part-000002.csv"]
    first = (tmp_path / "leakwatch/ledger/part-000000.csv").read_text().splitlines()
    assert first[0] == "run,epoch,step,sample,class,quantity,value,status"
    assert first[1] == "r,0,0,7,1,i2f,1.0,ok"
    opened = RiskLedger.open(tmp_path / "leakwatch")
    assert opened.position == 3
    assert opened.rows() == [row(0), row(0, 2.0, "loss"), row(2)]


def test_a_reopened_ledger_continues(tmp_path: Path) -> None:
    fill(tmp_path)
    again = RiskLedger(tmp_path)
    assert again.position == 3
    assert again.append([row(9)]) == 4
    assert [r.epoch for r in again.rows()] == [0, 1, 2, 9]


def test_two_writers_do_not_overwrite_each_other(tmp_path: Path) -> None:
    one, two = RiskLedger(tmp_path), RiskLedger(tmp_path)
    one.append([row(0)])
    assert two.append([row(1)]) == 2
    assert [r.epoch for r in one.rows()] == [0, 1]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes")
def test_directories_and_files_are_private(tmp_path: Path) -> None:
    ledger = fill(tmp_path / "leakwatch")
    ledger.write_probes(np.zeros((1, 2, 2, 3), np.uint8), [7], [1])
    paths = [ledger.directory, *ledger.directory.rglob("*")]
    assert len(paths) == 11
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_a_failed_write_leaves_the_ledger_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = fill(tmp_path)
    before = sorted(p.name for p in (tmp_path / "ledger").iterdir())

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(storage.os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        ledger.append([row(3)], {"eigenvalues": np.ones((1, 2))})
    assert ledger.position == 3
    assert sorted(p.name for p in (tmp_path / "ledger").iterdir()) == before


def test_the_data_is_on_disk_before_it_takes_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        storage.os, "fsync", lambda handle: (calls.append("fsync"), sync(handle))
    )

    def move(source: str, target: Path) -> None:
        assert Path(source).parent == target.parent
        calls.append("replace")
        replace(source, target)

    monkeypatch.setattr(storage.os, "replace", move)
    RiskLedger(tmp_path).append([row(0)])
    assert calls[:2] == ["fsync", "replace"]


def test_spectra_of_a_killed_append_do_not_stick_to_the_next(tmp_path: Path) -> None:
    ledger = fill(tmp_path)
    orphan = tmp_path / "spectra" / "part-000003.npz"
    orphan.write_bytes((tmp_path / "spectra" / "part-000002.npz").read_bytes())
    assert len(ledger.spectra()) == 3
    ledger.append([row(3)])
    assert not orphan.exists()


def test_torn_and_foreign_files_are_ignored_with_a_warning(tmp_path: Path) -> None:
    fill(tmp_path)
    part = tmp_path / "ledger" / "part-000001.csv"
    part.write_bytes(part.read_bytes()[:-4])
    (tmp_path / "spectra" / "part-000002.npz").write_bytes(b"PK torn")
    (tmp_path / "ledger" / "notes.txt").write_text("hello")
    with pytest.warns(LedgerWarning, match=r"notes\.txt is ignored"):
        ledger = RiskLedger.open(tmp_path)
    with pytest.warns(LedgerWarning, match=r"part-000001\.csv is ignored.*cut short"):
        rows = ledger.rows()
    with pytest.warns(LedgerWarning, match=r"part-000002\.npz is ignored"):
        assert len(ledger.spectra()) == 2
    assert [r.epoch for r in rows] == [0, 2]
    assert len(ledger.problems) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ledger.rows()


def test_temporary_files_of_a_killed_run_are_silent_and_swept(tmp_path: Path) -> None:
    ledger = fill(tmp_path)
    leftover = tmp_path / "ledger" / ".part-000003.csv.abc.tmp"
    leftover.write_text("run,ep")
    assert len(RiskLedger.open(tmp_path).rows()) == 3
    ledger.truncate(3)
    assert not leftover.exists()


def test_truncate_drops_parts_and_spectra(tmp_path: Path) -> None:
    ledger = fill(tmp_path)
    ledger.truncate(1)
    assert ledger.position == 1
    assert [r.epoch for r in ledger.rows()] == [0]
    assert len(ledger.spectra()) == 1
    assert not (tmp_path / "spectra" / "part-000001.npz").exists()
    aside = {p.name for p in (tmp_path / "replaced" / "1").rglob("part-*")}
    assert aside == {f"part-00000{i}.{end}" for i in (1, 2) for end in ("csv", "npz")}
    assert ledger.append([row(5)]) == 2
    with pytest.raises(ValueError, match="position is -1"):
        ledger.truncate(-1)


def test_truncate_beyond_the_end_warns_and_keeps_everything(tmp_path: Path) -> None:
    ledger = fill(tmp_path)
    with pytest.warns(LedgerWarning, match="knows 5 ledger parts but .* holds 3"):
        ledger.truncate(5)
    assert ledger.position == 3
    assert len(ledger.rows()) == 3


def test_copy_from_takes_the_first_parts(tmp_path: Path) -> None:
    fill(tmp_path / "old")
    new = RiskLedger(tmp_path / "new")
    new.copy_from(tmp_path / "old", 2)
    assert new.position == 2
    assert [r.epoch for r in new.rows()] == [0, 1]
    assert len(new.spectra()) == 2
    old_part = (tmp_path / "old/ledger/part-000001.csv").read_bytes()
    assert (tmp_path / "new/ledger/part-000001.csv").read_bytes() == old_part
    with pytest.raises(ValueError, match="holds 2 parts already"):
        new.copy_from(tmp_path / "old", 1)
    new.copy_from(tmp_path / "new", 1)
    assert new.position == 1
    assert len(RiskLedger(tmp_path / "old").rows()) == 3


def test_copy_from_a_missing_run_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no leakwatch run in"):
        RiskLedger(tmp_path / "new").copy_from(tmp_path / "none", 1)


def test_open_without_a_run_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match="lightning_logs/version_0/leakwatch-run"
    ):
        RiskLedger.open(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_a_run_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="expected a directory"):
        RiskLedger(tmp_path / "file")


def test_metadata_is_filled_in_and_read_back(tmp_path: Path) -> None:
    ledger = RiskLedger(tmp_path, run="über")
    assert ledger.read_metadata() == {}
    ledger.write_metadata(
        {"class_names": ("a", "b"), "n": np.int64(3), "path": tmp_path, "s": {"x"}}
    )
    content = RiskLedger.open(tmp_path).read_metadata()
    assert content["schema_version"] == SCHEMA_VERSION
    assert content["run"] == "über"
    assert RiskLedger.open(tmp_path).run == "über"
    assert content["created"].endswith("+00:00")
    assert content["class_names"] == ["a", "b"]
    assert (content["n"], content["path"], content["s"]) == (3, str(tmp_path), ["x"])


@pytest.mark.parametrize("text", ['{"run": "x', "[1]", "\udcff"])
def test_torn_metadata_is_ignored_with_a_warning(tmp_path: Path, text: str) -> None:
    fill(tmp_path)
    (tmp_path / "run.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.warns(LedgerWarning, match=r"run\.json is ignored"):
        assert RiskLedger(tmp_path).read_metadata() == {}


def test_newer_metadata_warns_and_is_used(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"schema_version": 99, "run": "n"}))
    with pytest.warns(LedgerWarning, match="schema version 99"):
        assert RiskLedger(tmp_path).read_metadata()["run"] == "n"


def test_spectra_round_trip_exactly(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(3, 4)) * 1e-200
    values[0, 0] = np.nan
    ledger = RiskLedger(tmp_path)
    ledger.append(
        [], {"eigenvalues": values, "class": [1, 2, 3], "file": 1, "name": ["a"]}
    )
    [read] = ledger.spectra()
    assert read["eigenvalues"].tobytes() == values.tobytes()
    assert read["class"].tolist() == [1, 2, 3]
    assert (read["file"].item(), read["name"].item()) == (1, "a")


def test_objects_are_refused_as_spectra(tmp_path: Path) -> None:
    ledger = RiskLedger(tmp_path)
    with pytest.raises(ValueError, match="'x' holds Python objects"):
        ledger.append([row(0)], {"x": np.array([{}], dtype=object)})
    assert ledger.position == 0
    assert not (tmp_path / "ledger").exists()


def test_probes_round_trip_and_check_their_shape(tmp_path: Path) -> None:
    ledger = RiskLedger(tmp_path)
    assert ledger.read_probes() is None
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3)
    ledger.write_probes(pixels, [5, 9], [0, 1])
    read = ledger.read_probes()
    assert read is not None
    np.testing.assert_array_equal(read["pixels"], pixels)
    assert read["index"].tolist() == [5, 9]
    with pytest.raises(ValueError, match="expected uint8 of shape"):
        ledger.write_probes(pixels.astype(np.float32), [5, 9], [0, 1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="for 2 pictures"):
        ledger.write_probes(pixels, [5], [0, 1])


def test_dataframe_has_nullable_integers_and_class_names(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    ledger = RiskLedger(tmp_path, run="r")
    ledger.append([row(0), Row(0, 0, None, None, "seconds", 2.5)])
    frame = ledger.to_dataframe()
    assert list(frame.columns) == [
        "run",
        "epoch",
        "step",
        "sample",
        "class",
        "quantity",
        "value",
        "status",
    ]
    assert str(frame["sample"].dtype) == str(frame["class"].dtype) == "Int64"
    assert frame["sample"].tolist() == [7, pandas.NA]
    ledger.write_metadata({"class_names": ["cat", "dog"]})
    named = ledger.to_dataframe()
    assert named["class_name"].iloc[0] == "dog"
    assert pandas.isna(named["class_name"].iloc[1])


def test_dataframe_of_an_empty_ledger(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    frame = RiskLedger(tmp_path).to_dataframe()
    assert len(frame) == 0
    assert str(frame["value"].dtype) == "float64"


def test_missing_pandas_says_how_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install jinja2 plotly pandas"):
        RiskLedger(tmp_path).to_dataframe()
