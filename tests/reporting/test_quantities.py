from __future__ import annotations

from leakwatch.reporting import quantities_from_metadata
from leakwatch.reporting.quantities import class_names_from_metadata, describe


def test_descriptions_come_from_metadata() -> None:
    found = quantities_from_metadata(
        {
            "quantities": {
                "i2f": {"unit": "px", "direction": "higher = less exposed", "new": 1},
                "odd": {"unit": None, "direction": "sideways"},
                "broken": "text",
            }
        }
    )
    assert set(found) == {"i2f", "odd"}
    assert (found["i2f"].unit, found["i2f"].sign) == ("px", -1)
    assert (found["odd"].unit, found["odd"].sign) == ("", 0)


def test_missing_descriptions_are_empty_except_for_the_headline() -> None:
    assert describe("x", None).sign == 0
    assert describe("i2f_psnr", {}).unit == "dB"
    assert describe("i2f_bayes_psnr", None).sign == 1


def test_odd_metadata_is_no_metadata() -> None:
    assert quantities_from_metadata({"quantities": ["i2f"]}) == {}
    assert class_names_from_metadata({"class_names": None}) is None
    assert class_names_from_metadata({"class_names": [0, "b"]}) == ("0", "b")
