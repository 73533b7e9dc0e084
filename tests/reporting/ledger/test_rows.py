from __future__ import annotations

import math
import struct

import numpy as np
import pytest

from leakwatch.reporting import STATUS_WORDS, Row
from leakwatch.reporting.ledger.rows import (
    decode_rows,
    encode_rows,
    is_usable,
    status_reason,
)


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@pytest.mark.parametrize(
    "value",
    [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.pi * 1e-17, math.inf, -math.inf],
)
def test_floats_come_back_bit_for_bit(value: float) -> None:
    row = Row(3, 17, 5, 2, "i2f", value, "ok")
    [(run, read)] = decode_rows(encode_rows([row], "a run"))
    assert run == "a run"
    assert bits(read.value) == bits(value)
    assert read == row


def test_random_floats_and_nan_come_back() -> None:
    generator = np.random.default_rng(0)
    values = generator.normal(size=300) * 10.0 ** generator.integers(-300, 300, 300)
    rows = [Row(0, 0, i, None, "i2f", float(v), "ok") for i, v in enumerate(values)]
    rows.append(Row(0, 0, None, None, "seconds", math.nan, "failed: no clock"))
    read = [row for _, row in decode_rows(encode_rows(rows, ""))]
    assert read[:-1] == rows[:-1]
    assert math.isnan(read[-1].value)
    assert (read[-1].sample, read[-1].label) == (None, None)


def test_numpy_scalars_become_plain_numbers() -> None:
    row = Row(np.int64(1), np.int32(2), np.int64(3), np.int8(4), "q", np.float64(0.5))  # type: ignore[arg-type]
    assert b"np." not in encode_rows([row], "")
    assert decode_rows(encode_rows([row], ""))[0][1] == Row(1, 2, 3, 4, "q", 0.5)


def test_odd_texts_stay_on_one_line() -> None:
    status = 'failed: said "no",\r\n  at line 3\0 of <b>; \ud800 ü'
    row = Row(0, 0, 1, 0, "a,b", 1.0, status)
    data = encode_rows([row], 'run "x",\ny')
    assert data.count(b"\n") == 2
    [(run, read)] = decode_rows(data)
    assert run == 'run "x", y'
    assert read.quantity == "a,b"
    assert read.status == 'failed: said "no", at line 3 of <b>; \\ud800 ü'


def test_long_statuses_are_cut() -> None:
    [(_, row)] = decode_rows(
        encode_rows([Row(0, 0, 1, 0, "q", 1.0, "failed: " + "x" * 10_000)], "")
    )
    assert len(row.status) == 2000
    assert row.status.endswith("…")


@pytest.mark.parametrize("status", ["", "fine", "OK", "safe: yes", "ok-ish"])
def test_unknown_status_word_raises(status: str) -> None:
    with pytest.raises(ValueError, match="must be one of ok, estimated, unresolved"):
        encode_rows([Row(0, 0, 1, 0, "i2f", 1.0, status)], "")


def test_empty_quantity_raises() -> None:
    with pytest.raises(ValueError, match="empty quantity"):
        encode_rows([Row(0, 0, 1, 0, "", 1.0)], "")


@pytest.mark.parametrize("word", STATUS_WORDS)
def test_only_ok_and_estimated_are_usable(word: str) -> None:
    assert is_usable(1.0, f"{word}: why") is (word in ("ok", "estimated"))
    assert not is_usable(math.nan, word)
    assert status_reason(f"{word}: why: that") == "why: that"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[:-3], "cut short"),
        (lambda data: b"", "cut short"),
        (lambda data: data[: data.index(b"\n") + 1] + b"1,2\n", "2 cells"),
        (lambda data: data.replace(b"quantity", b"qty"), "first line"),
        (lambda data: data.replace(b"1.5", b"one"), "one"),
        (lambda data: data + b'r,0,0,1,0,q,1.0,"ok\n', "unexpected end"),
        (lambda data: b"\xff\xfe\n", "decode"),
    ],
)
def test_damaged_parts_raise(damage, says: str) -> None:  # type: ignore[no-untyped-def]
    data = encode_rows([Row(0, 0, 1, 0, "i2f", 1.5)], "r")
    with pytest.raises(ValueError, match=says):
        decode_rows(damage(data))
