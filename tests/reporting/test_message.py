"""A report speaks of what was really shared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from reporting.audits import attacked, scored

from leakwatch.reporting import RiskLedger, Row, write_report
from leakwatch.reporting.message import GRADIENT, UPDATE, message_from_metadata


def words(folder: Path, mismatch: float = 0.05, **metadata: object) -> str:
    """All text of the report of an audit, figures included, glossary left out."""
    ledger = RiskLedger(folder)
    config = {"noise_std": None, "prior_std": 0.3, "data_range": 1.0}
    ledger.write_metadata({"config": config, **metadata})
    rows = scored({"joint_i2f_bayes_psnr": [20.0, 24.0, 22.0]})
    rows += scored({"audit/baseline/constant_psnr": [9.0, 9.5, 10.0]})
    rows += scored({"audit/baseline/mean_psnr": [11.0, 11.5, 12.0]})
    rows += attacked("random", [30, 9, 20], [True, False, True])
    names = {"psnr": 25.0, "loss": 0.02, "surrogate_similarity": 0.995}
    names["surrogate_mismatch"] = mismatch
    if metadata.get("message") == "update":
        rows += [
            Row(1, 10, None, None, f"update/client-44/{name}", value)
            for name, value in names.items()
        ]
    eigenvalues = [[2.0, 1.0], [3.0, 1.0], [4.0, 1.0]]
    ledger.append(rows, {"eigenvalues": eigenvalues, "epoch": 1, "step": 10})
    page = write_report(folder).read_text("utf-8")
    head = page.split("<body>", 1)[1].split("</main>", 1)[0]
    return " ".join(re.sub(r"<[^>]*>", " ", head).split())


def test_an_update_audit_never_speaks_of_shared_gradients(tmp_path: Path) -> None:
    said = words(tmp_path, message="update", model_name="LeNet")
    assert "Weight-update leakage of LeNet" in said
    assert "who sees the weight update of the client that holds" in said
    assert "Weight updates of watched clients were attacked after epoch 1" in said
    assert "did not match its weight update is inconclusive" in said
    assert "blind guess, without any weight update" in said
    assert "What the weight update sees" in said
    assert "All samples of a client at once." in said
    # Only as what stands for an update in predictions, and of a tool for gradients.
    left = re.findall(r"[^.]*gradient[^.]*\.", said, re.IGNORECASE)
    allowed = ("gradient does not explain of an update", "gradient stands for the")
    allowed += ("take the update for a gradient between the weights before and after",)
    allowed += ("one gradient does not explain the update",)
    allowed += ("speaks of single gradients: what noise does to an update",)
    assert all(any(text in s for text in allowed) for s in left), left


def test_clients_have_a_table(tmp_path: Path) -> None:
    said = words(tmp_path, message="update")
    assert "#44 25.0 0.0200 0.00500 0.0500" in said
    assert "#44" not in words(tmp_path / "other")


def test_what_a_reader_must_know_stands_beside_the_headline(tmp_path: Path) -> None:
    assert "Read with care" not in words(tmp_path / "a", message="update")
    far = words(tmp_path / "b", mismatch=0.87, message="update")
    assert "One gradient does not explain these updates (mismatch 0.870" in far
    said = words(tmp_path / "c", assumed=["no defense adds this noise"])
    assert "Read with care. No defense adds this noise." in said


def test_a_gradient_audit_speaks_of_gradients(tmp_path: Path) -> None:
    said = words(tmp_path, model_name="LeNet")
    assert "Gradient leakage of LeNet" in said
    assert "who sees the gradient of the most exposed sample" in said
    assert "Gradients of watched samples were attacked after epoch 1" in said
    assert "One sample per gradient." in said
    assert "weight update" not in said.lower()


@pytest.mark.parametrize(
    ("given", "expected"),
    [("update", UPDATE), ("gradient", GRADIENT), ("carrier pigeon", GRADIENT)],
)
def test_kinds_by_name(given: str, expected: object) -> None:
    assert message_from_metadata({"message": given}) is expected
