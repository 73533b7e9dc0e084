"""The sentences on top of a report say what the ledger holds."""

from __future__ import annotations

import math
from typing import Any

from reporting.audits import attacked

from leakwatch.reporting import LedgerTable, Row
from leakwatch.reporting.html.conclusions import conclude
from leakwatch.reporting.run_facts import RunFacts
from leakwatch.reporting.statistics.headline import find_headline

FACTS = RunFacts.of({"class_names": ["cat", "dog"]})


def probe(epoch: int, *values: float, name: str = "i2f_psnr") -> list[Row]:
    """NaN stands for a value that failed; classes in turn."""
    return [
        Row(
            epoch, 10 * epoch, i, i % 2, name, v, "failed: x" if math.isnan(v) else "ok"
        )
        for i, v in enumerate(values)
    ]


def answers(*rows: Row, **config: Any) -> dict[str, str]:
    table = LedgerTable.from_rows(rows)
    found = conclude(table, find_headline(table), FACTS, {"config": config})
    return {item.question.partition(" ")[0]: item.answer for item in found}


def test_who_is_worst_off() -> None:
    said = answers(*probe(0, 31.0, 20.0, 22.0), *probe(1, 18.0, 26.0, 20.0))
    assert said["Who"] == (
        "Sample #1 (dog): 26.0 dB, clearly recognisable; it rose by 6.0 dB since the "
        "first probe. Of classes, dog is worst off: 26.0 dB (one sample), cat has 19.0 "
        "dB. The median fell by 2.0 dB since the first probe. The worst moment was "
        "before training, with 31.0 dB."
    )
    assert said["How"] == "1 of 3 samples with a number."
    two = answers(*probe(1, 18.0, 26.0, 20.0, 28.0))["Who"]
    assert "dog is worst off: 27.0 dB on average, cat has 19.0 dB." in two
    assert said["What"].endswith("(leakwatch compare-inits).")
    same = answers(*probe(0, 20.0, 21.0), *probe(1, 20.2, 21.2))
    assert "The median hardly changed (0.2 dB) since the first probe." in same["Who"]


def test_what_the_worst_sample_was_may_not_be_known() -> None:
    unknown = "; what it was at the first probe is not known."
    said = answers(*probe(0, 31.0, math.nan), *probe(1, 18.0, 26.0))["Who"]
    assert f"Sample #1 (dog): 26.0 dB, clearly recognisable{unknown}" in said
    later = answers(*probe(0, 31.0), *probe(1, 18.0, 26.0))["Who"]
    assert unknown in later
    assert "first probe" not in answers(*probe(1, 18.0, 26.0))["Who"]


def test_medians_are_compared_over_the_same_samples() -> None:
    first = probe(0, 20.0, 21.0, 60.0, 61.0)
    said = answers(*first, *probe(1, 23.0, 25.0, math.nan, math.nan))["Who"]
    both = "The median of the 2 with a number then and now rose by 3.5 dB since"
    assert both in said
    nothing = [*probe(0, math.nan, 20.0), *probe(1, 20.0, math.nan)]
    assert "The median" not in answers(*nothing)["Who"]


def test_a_sample_without_prediction_is_worst_off_where_attacks_show_it() -> None:
    known = probe(1, 20.0, math.nan, 20.0)
    alone = "Sample #1 has no prediction, and an attack came to 50.0 dB on it"
    said = answers(*known, *attacked("near", [20.5, 50.0, 19.0], [True] * 3))["Who"]
    assert f"{alone}: it is worse off." in said
    failed = attacked("near", [20.5, 50.0, 19.0], [True, False, True])
    weaker = attacked("near", [20.5, 15.0, 19.0], [True] * 3)
    both = [*probe(1, 20.0, 49.0, 20.0), *attacked("near", [1.0, 50.0], [True] * 2)]
    for rows in ([*known, *failed], [*known, *weaker], both):
        assert "has no prediction" not in answers(*rows)["Who"]


def test_a_turn_since_the_first_probe_is_named() -> None:
    fell = [*probe(0, 42.0, 42.0), *probe(1, 19.0, 19.0)]
    said = answers(*fell, *probe(2, 30.0, 30.0))["Who"]
    assert (
        "The median fell by 12.0 dB since the first probe, and rose by 11.0 dB since "
        "the probe before this one." in said
    )
    said = answers(*fell, *probe(2, 15.0, 15.0))["Who"]
    assert "The median fell by 27.0 dB since the first probe." in said


def test_what_is_unknown_is_counted() -> None:
    said = answers(*probe(1, 10.0, math.nan))
    assert said["How"] == (
        "0 of 1 sample with a number. 1 more has no number, which is not safe."
    )
    assert "attack them before you rely on it" in said["What"]
    assert answers(*probe(1, math.nan)) == {}
    assert answers(Row(1, 10, 0, 0, "loss", 1.0)) == {}


def test_trust_counts_conclusive_attacks_alone() -> None:
    predicted = probe(1, 20.0, 20.0, 20.0)
    assert answers(*predicted)["Does"].startswith("Nothing in this record has")
    failed = attacked("near", [40.0] * 3, [False] * 3)
    assert answers(*predicted, *failed)["Does"].startswith(
        "None of 3 worst case attacks"
    )
    good = attacked("near", [20.5, 19.0, 60.0], [True, True, False])
    assert answers(*predicted, *good)["Does"] == (
        "As far as 2 attacks can show, yes: none did better than predicted by 1 dB or "
        "more. 2 of 3 worst case attacks were conclusive (median −0.2 dB from the "
        "prediction). A correlation takes 8 conclusive attacks of a kind."
    )
    better = attacked("near", [24.5, 19.0, 60.0], [True, True, False])
    assert answers(*predicted, *better)["Does"].startswith(
        "No: 1 of 2 attacks did better than predicted, one by 4.5 dB (24.5 dB where "
        "20.0 dB was predicted): read it as too low."
    )
    nearly = attacked("near", [21.5, 19.0, 60.0], [True, True, False])
    said = answers(*predicted, *nearly)["Does"]
    assert said.startswith("Nearly: 1 of 2 attacks")
    assert "(21.5 dB where 20.0 dB was predicted)." in said
    far = attacked("random", [20.0, 9.0, 20.0], [True] * 3)
    assert (
        "(median 0.0 dB from the prediction, 1 more than 10 dB below it)"
        in answers(*predicted, *far)["Does"]
    )


def test_many_attacks_without_a_better_one_are_a_yes() -> None:
    many = [*probe(1, *[20.0] * 8), *attacked("near", [20.0] * 8, [True] * 8)]
    assert answers(*many)["Does"].startswith("Yes: none of 8 attacks did better")


def test_attacks_far_below_a_prediction_have_not_tested_it() -> None:
    far = attacked("near", [16.0] * 8, [True] * 8)
    said = answers(*probe(1, *[80.0] * 8), *far)["Does"]
    assert said.startswith("Not tested: no attack came within 10 dB of its prediction.")
    one = attacked("near", [16.0] * 7 + [79.5], [True] * 8)
    said = answers(*probe(1, *[80.0] * 8), *one)["Does"]
    assert said.startswith("As far as 1 attack can show, yes")


def test_attacks_on_what_was_not_predicted_are_told_apart() -> None:
    reached = attacked("near", [20.5, 50.0, 19.0], [True, True, True])
    said = answers(*probe(1, 20.0, math.nan, 20.0), *reached)["Does"]
    assert said.startswith("As far as 2 attacks can show, yes")
    assert "Of these 1 had no prediction: the best came to 50.0 dB." in said
    known = answers(*probe(1, 20.0, 49.5, 20.0), *reached)["Does"]
    assert "no prediction" not in known


def test_the_noise_that_was_recorded_is_named() -> None:
    noise = probe(1, 0.03, 0.02, name="noise_std_for_psnr")
    said = answers(*probe(1, 30.0, 20.0), *noise, target_psnr=18.0)["What"]
    assert said.startswith("Noise of standard deviation 0.0300 on each entry")
    assert "would keep all samples below 18 dB by prediction" in said
    said = answers(*probe(1, 30.0, 20.0))["What"]
    assert "leakwatch.recommend_noise(net, x, y, target_psnr=20)" in said


def test_the_layer_that_holds_most_is_named() -> None:
    layers = [
        row
        for name, share in (("fc", 0.8), ("conv", 0.2))
        for row in probe(1, share, share, name=f"layers/{name}")
    ]
    said = answers(*probe(1, 30.0, 20.0), *layers)["What"]
    assert "The layer fc holds 80% of Σλ" in said
