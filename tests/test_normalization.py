"""mean and std mean the same in all entry points, whatever holds the numbers."""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import leakwatch
from leakwatch import ProbeSet, WeightUpdate
from leakwatch.attacks import PixelScale
from leakwatch.callbacks import InversionAudit, LeakageMonitor
from leakwatch.normalization import (
    as_channels,
    check_normalization,
    per_channel,
    to_input,
    to_pixels,
)
from leakwatch.priors import measured_prior
from leakwatch.quality import quality

MEAN, STD = (0.5, 0.25), (0.25, 0.125)
GENERATOR = torch.Generator().manual_seed(0)
PIXELS = torch.rand(2, 2, 3, 3, generator=GENERATOR).double()
M, S = (torch.tensor(v).double()[:, None, None] for v in (MEAN, STD))
X = ((PIXELS - M) / S).float()
Y = torch.tensor([0, 1])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(18, 4), nn.Sigmoid(), nn.Linear(4, 2))


def update() -> WeightUpdate:
    net = network()
    before = nn.utils.parameters_to_vector(net.parameters()).detach()
    return WeightUpdate(before, before[None] * 0.99, Y[None], (2, 3, 3), samples=2)


ENTRIES: dict[str, Callable[..., Any]] = {
    "score": lambda **k: leakwatch.score(network(), X, Y, ["grad_norm"], **k)[
        "grad_norm"
    ],
    "attack": lambda **k: leakwatch.attack(
        network(), X, Y, "lavp-l2", steps=1, **k
    ).images,
    "quality": lambda **k: quality(X, X.flip(0), metrics=["mse"], **k)["mse"],
    "probes": lambda **k: ProbeSet.from_tensors(X, Y, **k).pixels(),
    "scale": lambda **k: PixelScale(**k).to_pixels(X),
    "scale of": lambda **k: PixelScale.of(k["mean"], k.get("std"), None).to_pixels(X),
    "monitor": lambda **k: torch.tensor(_stated(LeakageMonitor(**k))),
    "audit": lambda **k: torch.tensor(_stated(InversionAudit(**k))),
    "updates": lambda **k: leakwatch.score_update(
        network(), X[None], Y[None], update(), ["lavp_l2_max"], joint=False, **k
    )["lavp_l2_max"],
    "update attack": lambda **k: leakwatch.attack_update(
        network(), update(), "ig-update", steps=1, **k
    ).images,
    "noise": lambda **k: torch.tensor(
        leakwatch.recommend_noise(network(), X, Y, check=0, **k).noise_std
    ),
    "unfairness": lambda **k: torch.tensor(
        leakwatch.unfairness(network(), X, Y, 0.1, **k).classes[0].psnr
    ),
    "initialisations": lambda **k: torch.tensor(
        leakwatch.compare_initializations(
            network(), X, Y, ["uniform", "normal"], seeds=1, attacks=[], **k
        ).verdict("i2f_bayes_psnr").level
    ),
    "trade-off": lambda **k: torch.tensor(
        leakwatch.trade_off(
            network(), X, Y, lambda *_: None, lambda _: 0.5, defenses=["gaussian"],
            budgets=[1.0], steps=2, **k,
        ).cells[0].accuracy
    ),
}  # fmt: skip


def _stated(callback: Any) -> list[Any]:
    return [callback.mean, callback.std]


FORMS: dict[str, Callable[[tuple[float, ...]], Any]] = {
    "list": list,
    "array": np.array,
    "float32 tensor": torch.tensor,
    "broadcast tensor": lambda v: torch.tensor(v)[:, None, None],
    "array of objects": lambda v: np.array([np.float64(n) for n in v]),
}


@pytest.mark.parametrize("form", FORMS)
def test_containers_of_numbers_work_alike(form: str) -> None:
    hold = FORMS[form]
    for entry in ("quality", "probes", "scale", "scale of", "monitor", "audit"):
        call = ENTRIES[entry]
        expected = call(mean=MEAN, std=STD)
        found = call(mean=hold(MEAN), std=hold(STD))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("entry", ["score", "attack"])
def test_scores_and_attacks_take_tensors(entry: str) -> None:
    expected, found = (
        ENTRIES[entry](mean=hold(MEAN), std=hold(STD))
        for hold in (tuple, FORMS["broadcast tensor"])
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("one", [torch.tensor(0.5), np.float32(0.5), [0.5], 0.5])
def test_one_number_is_for_all_channels(one: Any) -> None:
    for entry in ("scale", "monitor"):
        found = ENTRIES[entry](mean=one, std=one)
        expected = ENTRIES[entry](mean=(0.5,), std=(0.5,))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "alone": ({"mean": MEAN}, ValueError, "give both or neither"),
    "text": ({"mean": "a", "std": STD}, TypeError, "mean must be one finite number"),
    "none": ({"mean": [], "std": []}, TypeError, "mean must be one finite number"),
    "matrix": (
        {"mean": torch.ones(2, 2), "std": STD},
        TypeError,
        "mean must be one finite number",
    ),
    "true": ({"mean": [True, 1], "std": STD}, TypeError, "one finite number"),
    "nan": ({"mean": (0.5, math.nan), "std": STD}, ValueError, "mean must be finite"),
    "zero": ({"mean": MEAN, "std": (0.5, 0.0)}, ValueError, "std must be positive"),
    "lengths": ({"mean": 0.5, "std": STD}, ValueError, "mean has 1 entries and std 2"),
    "channels": (
        {"mean": [0.5] * 3, "std": [0.5] * 3},
        ValueError,
        "mean and std have 3 entries, one per channel, but",
    ),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_is_no_normalisation_is_refused_alike(entry: str) -> None:
    for name, (arguments, error, text) in BAD.items():
        if name == "channels" and entry in ("monitor", "audit"):
            continue  # the samples come later
        with pytest.raises(error, match=text):
            ENTRIES[entry](**arguments)


def test_pixels_against_the_formula() -> None:
    assert as_channels("mean", np.float32(0.5)) == (0.5,)
    torch.testing.assert_close(to_pixels(X.double(), MEAN, STD), PIXELS)
    torch.testing.assert_close(to_input(PIXELS, MEAN, STD, -3), X.double())
    assert to_pixels(X, None, None) is X
    column = per_channel(STD, X[0], -3)
    assert column.flatten().tolist() == list(STD)
    assert isinstance(column, Tensor)
    assert column.shape == (2, 1, 1)


DOUBTING = [
    name
    for name in ENTRIES
    if name not in ("quality", "probes", "scale", "scale of", "monitor", "audit")
    and name != "update attack"  # an attacker has no inputs
]


@pytest.mark.parametrize("entry", DOUBTING)
def test_inputs_that_look_like_pixels_are_doubted(
    entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "X", PIXELS.float())
    with pytest.warns(UserWarning, match="these lie between 0 and 1, as pixels do"):
        ENTRIES[entry](mean=MEAN, std=STD)


@pytest.mark.parametrize("callback", [LeakageMonitor, InversionAudit])
def test_given_probes_that_look_like_pixels_are_doubted(callback: Any) -> None:
    pixels = ProbeSet.from_tensors(PIXELS.float(), Y, mean=MEAN, std=STD)
    with pytest.warns(UserWarning, match="these lie between 0 and 1, as pixels do"):
        callback(probes=pixels)
    callback(probes=ProbeSet.from_tensors(X, Y, mean=MEAN, std=STD))


@pytest.mark.parametrize(
    "entry", [name for name in DOUBTING if name not in ("attack", "trade-off")]
)
def test_the_normalisation_of_bytes_is_doubted_for_pixels_up_to_1(entry: str) -> None:
    """Predictions would be of errors 255 times larger: below 11 dB."""
    wrong = {"mean": [255 * m for m in MEAN], "std": [255 * s for s in STD]}
    with (
        pytest.warns(UserWarning, match=r"outside of \[0, 1\]"),
        contextlib.suppress(ValueError),  # attacks refuse them
    ):
        ENTRIES[entry](**wrong)


def test_pixels_a_little_outside_of_their_range_are_not_doubted() -> None:
    noisy = PIXELS * 1.15 - 0.05
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_normalization(MEAN, STD, (noisy - M) / S, 1.0)


@pytest.mark.parametrize(
    "x",
    [X.double(), PIXELS - 0.5, PIXELS * 1.1 + 0.1],
    ids=["normalised", "below 0", "above 1"],
)
def test_inputs_beyond_the_range_of_pixels_are_not_doubted(x: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_normalization(MEAN, STD, x) == (MEAN, STD)


def test_a_mean_of_zero_leaves_pixels_in_their_range() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_normalization((0.0, 0.5), STD, PIXELS)
        check_normalization(None, None, PIXELS)


def test_a_prior_of_normalised_images_is_doubted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    images = torch.rand(32, 2, 3, 3, generator=torch.Generator().manual_seed(1))
    for shift in (0.0, 2.0):
        assert not caplog.records
        leakwatch.score(
            network(), X, Y, ["bayes"], noise_std=1e-2, mean=MEAN, std=STD,
            prior=measured_prior(images + shift),
        )  # fmt: skip
    assert "measure the prior from pixels, not from normalised inputs" in caplog.text
