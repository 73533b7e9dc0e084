from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import ttest_ind

import leakwatch
from leakwatch import Status
from leakwatch.scores import Settings, Value
from leakwatch.status import OK
from leakwatch.studies import SampleRisk, Unfairness
from leakwatch.studies.noise.spectra import NoiseResponse
from leakwatch.studies.noise.unequal_protection import _classes
from studies.problems import eigenvalues, network, samples

R2 = 1 / 12
NOISE = 0.05


def squared_error(lam: np.ndarray, noise_std: float) -> float:
    return float((noise_std**2 * R2 / (noise_std**2 + lam * R2)).sum())


def test_equalising_noise_against_dense_spectra() -> None:
    x, y = samples(9)
    net = network()
    found = leakwatch.unfairness(net, x, y, NOISE, dtype=torch.float64)
    spectra = [eigenvalues(net, x[i], y[i]).numpy() for i in range(9)]
    known = leakwatch.score(
        net, x, y, ["i2f_range_psnr"], noise_std=NOISE, dtype=torch.float64
    )["i2f_range_psnr"]
    everyone = np.mean([squared_error(lam, NOISE) for lam in spectra])
    assert {c.label for c in found.classes} == {0, 1, 2}
    for c in found.classes:
        mine = [
            lam
            for lam, label in zip(spectra, y.tolist(), strict=True)
            if label == c.label
        ]

        def gap(s: float, mine: list[np.ndarray] = mine) -> float:
            return float(np.mean([squared_error(lam, s) for lam in mine]) - everyone)

        expected = brentq(gap, 1e-6, 1e3, xtol=1e-14)
        assert c.noise_std.status == OK
        assert c.noise_std.number == pytest.approx(expected, rel=1e-6)
        inside = y == c.label
        assert c.psnr == pytest.approx(float(known[inside].mean()), abs=1e-9)
        assert (c.count, c.used) == (3, 3)
    order = [c.psnr for c in found.classes]
    assert order == sorted(order, reverse=True)
    assert [s.psnr.number for s in found.samples] == sorted(
        (s.psnr.number for s in found.samples), reverse=True
    )


def fake(psnr: dict[int, list[float]]) -> Unfairness:
    """Classes with given predicted PSNR, NaN for unresolved ones."""
    lost = Status("unresolved", "too small")
    samples = [
        SampleRisk(i, label, Value(v, lost if math.isnan(v) else OK))
        for i, (label, v) in enumerate((c, v) for c, vs in psnr.items() for v in vs)
    ]
    spectra = [NoiseResponse(None, Settings(), s.psnr.status) for s in samples]
    classes = _classes(samples, spectra, NOISE, 0.95)
    return Unfairness(NOISE, tuple(samples), tuple(classes), 0.95)


def test_only_clear_classes_are_under_protected() -> None:
    random = np.random.default_rng(0)
    groups = {c: (15 + random.normal(size=6)).tolist() for c in range(4)}
    groups[2] = [v + 8 for v in groups[2]]
    found = fake(groups)
    assert found.under_protected == (2,)
    assert [c.high < 0 for c in found.classes] == [True, True, False, True]
    even = fake({c: (15 + random.normal(size=6)).tolist() for c in range(4)})
    assert even.under_protected == ()


def test_interval_of_two_classes_is_students() -> None:
    first, second = [14.0, 15.5, 17.0], [20.0, 21.0, 23.5, 22.0]
    found = fake({0: first, 1: second})
    expected = ttest_ind(second, first).confidence_interval(0.975)
    c = next(c for c in found.classes if c.label == 1)
    assert (c.low, c.high) == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_unknown_is_never_safe() -> None:
    found = fake({0: [math.nan, math.nan], 1: [20.0, 21.0], 2: [math.nan, 19.0]})
    lost = found.classes[0]
    assert math.isnan(lost.psnr)
    assert not lost.under_protected
    assert lost.noise_std.status.word == "not computed"
    assert [(c.used, c.count) for c in found.classes] == [(0, 2), (2, 2), (1, 2)]
    assert "0         not known, which is not safe" in str(found)
    assert "3 of 6 samples known" in str(found)


def test_one_sample_a_class_has_no_interval() -> None:
    found = fake({0: [20.0], 1: [10.0]})
    assert all(math.isnan(c.low) for c in found.classes)
    assert found.under_protected == ()


def test_rows_and_figure() -> None:
    x, y = samples()
    names = ("cat", "dog", "owl")
    found = leakwatch.unfairness(
        network(), x, y, NOISE, index=range(20, 26), class_names=names
    )
    assert {r.sample for r in found.rows()} == set(range(20, 26))
    assert {r.quantity for r in found.rows()} == {"i2f_range_psnr"}
    figure = found.figure()
    assert set(figure.layout.yaxis.ticktext) == set(names)
    assert "owl" in str(found)


def test_mistakes() -> None:
    x, y = samples()
    with pytest.raises(ValueError, match="noise_std must be positive"):
        leakwatch.unfairness(network(), x, y, -1.0)
    with pytest.raises(ValueError, match=r"level must lie in \(0, 1\), got 95"):
        leakwatch.unfairness(network(), x, y, 1.0, level=95)
