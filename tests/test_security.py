"""What a run folder holds runs no code, tells nobody, and is its owner's alone."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import socket
import stat
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from monitor_cases import fit, monitor, rows_of
from numpy.lib import format as npy

from leakwatch.callbacks import InversionAudit
from leakwatch.callbacks._recording.run_metadata import natural_directory
from leakwatch.cli import main
from leakwatch.reporting import LedgerWarning, RiskLedger, Row, write_report
from leakwatch.reporting.ledger.rows import decode_rows, encode_rows
from leakwatch.studies.files import csv_bytes


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def loaded(bomb: Bomb) -> bytes:
    """An npz whose array goes off when it is unpickled."""
    stream, member = io.BytesIO(), io.BytesIO()
    array = np.empty(1, object)
    array[0] = bomb
    npy.write_array(member, array, allow_pickle=True)
    with zipfile.ZipFile(stream, "w") as archive:
        for name in ("pixels", "index", "label", "eigenvalues", "sample", "epoch"):
            archive.writestr(f"{name}.npy", member.getvalue())
    return stream.getvalue()


def test_nothing_in_a_run_folder_is_unpickled(tmp_path: Path) -> None:
    bomb = Bomb(tmp_path / "boom")
    run = tmp_path / "run"
    ledger = RiskLedger(run)
    ledger.append([Row(0, 0, 1, 0, "i2f_psnr", 20.0)])
    for name in ("probes.npz", "spectra/part-000000.npz", "attacks/part-000000.npz"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(loaded(bomb))
    (run / "probes.pkl").write_bytes(pickle.dumps(bomb))
    with pytest.warns(LedgerWarning, match="is ignored"):
        write_report(run)
    (run / "run.json").write_bytes(pickle.dumps(bomb))
    with pytest.warns(LedgerWarning, match="is ignored"):
        write_report(run)
    torch.save({"state_dict": {}, "x": bomb}, tmp_path / "bad.ckpt")
    assert main(["attack", "--ckpt", str(tmp_path / "bad.ckpt")]) == 1
    assert not bomb.path.exists()
    pickle.loads(pickle.dumps(bomb))
    assert bomb.path.exists()  # it would have gone off


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", "'=1", "''", "plain", "'"])
def test_no_cell_is_a_formula_and_texts_come_back(text: str) -> None:
    row = Row(0, 0, 1, 0, text, -1.5)
    data = encode_rows([row], text)
    assert decode_rows(data) == [(text, row)]
    table = csv_bytes([{"model": text, "psnr": -1.5}])
    for content in (data, table):
        cells = [c for line in csv.reader(io.StringIO(content.decode())) for c in line]
        texts = [cell for cell in cells if cell != "-1.5"]
        assert not any(cell[:1] in "=+-@" for cell in texts if cell)


EVIL = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'


def test_no_name_becomes_markup(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ledger = RiskLedger(run, run=EVIL)
    ledger.append(
        [
            Row(0, 0, 1, 0, "i2f_psnr", 20.0),
            Row(0, 0, 1, 0, EVIL, 20.0, f"failed: {EVIL}"),
            Row(0, 0, 1, 0, f"layers/{EVIL}", 1.0),
            Row(0, 0, 1, 0, "audit/near/verdict", 1.0, f"not converged: {EVIL}"),
        ]
    )
    ledger.write_metadata(
        {
            "class_names": [EVIL], "model": EVIL, "model_name": EVIL, "notes": [EVIL],
            "assumed": [EVIL], "config": {EVIL: EVIL}, "created": EVIL, "units": EVIL,
            "quantities": {EVIL: {"unit": EVIL, "meaning": EVIL, "source": EVIL}},
        }
    )  # fmt: skip
    page = write_report(run).read_text()
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert "<img src=x" not in page


@pytest.mark.parametrize(
    "name", ["..", "../../etc", "/etc", "a/b", "a\\b", "~", ".ssh", "\0", "a\nb"]
)
def test_a_logger_s_name_chooses_no_other_folder(tmp_path: Path, name: str) -> None:
    trainer: Any = SimpleNamespace(
        log_dir=str(tmp_path),
        default_root_dir=str(tmp_path),
        logger=SimpleNamespace(name=name, version=None),
    )
    path = natural_directory(trainer, None, "leakwatch")
    inside = path.resolve().relative_to(tmp_path.resolve())
    assert len(inside.parts) <= 3
    assert not any(part.startswith(".") for part in inside.parts)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes")
def test_a_run_uses_no_network_and_its_files_are_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    audit = InversionAudit(
        2, attack="lavp-l2", worst_case=None, steps=2, restarts=1, scores=["norms"]
    )
    watched = monitor(report=True)
    fit(tmp_path, watched, audit)
    for callback in (watched, audit):
        assert rows_of(callback)
        folder = Path(str(callback.run_directory))
        assert (folder / "report.html").is_file()
        for path in [folder, *folder.rglob("*")]:
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
        text = json.loads((folder / "run.json").read_text())
        assert "pixels" not in text
