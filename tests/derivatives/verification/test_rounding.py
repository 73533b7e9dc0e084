from __future__ import annotations

import torch
from torch import Tensor

from leakwatch.derivatives import Weights
from leakwatch.derivatives.verification.rounding import Rounding

W = torch.tensor([0.5, -1.5, 2.0], dtype=torch.float64)


def steep(at: Weights, x: Tensor) -> Tensor:
    """exp(g·⟨w, x⟩ / ⟨1, |w x|⟩) changes by a factor e^(gε) when all moves by ε."""
    return torch.exp(1e6 * (at.shared["w"] @ x - W @ X) / (W * X).abs().sum())


X = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
AT = Weights({"w": W}, {})


def test_gain_is_the_condition_number_but_for_the_directions() -> None:
    rounding = Rounding()
    assert rounding.gain == 0
    assert rounding.explains(1e-12, steep, AT, X)
    # Two nudged factors in each product: at most 2e6; two random draws find a share.
    assert 1e5 < rounding.gain <= 2e6


def test_a_gap_beyond_rounding_is_not_explained() -> None:
    rounding = Rounding()
    # 128 units in the last place, times the gain, and no more.
    assert not rounding.explains(128 * 2.3e-16 * 2e6, steep, AT, X)
    assert rounding.gain == 0
    assert not rounding.explains(float("nan"), steep, AT, X)
    assert rounding.notes(torch.float64) == []


def test_a_lower_precision_inside_counts() -> None:
    gap = 1e-7
    linear = lambda at, x: at.shared["w"] * x  # noqa: E731
    assert not Rounding().explains(gap, linear, AT, X)
    assert Rounding([torch.float32]).explains(gap, linear, AT, X)
    assert Rounding().explains(gap, linear, Weights({"w": W.float()}, {}), X.float())


def test_notes_say_what_is_left_in_the_precision_of_the_results() -> None:
    rounding = Rounding()
    rounding.gain = 1e6
    (low,), (high,) = rounding.notes(torch.float32), rounding.notes(torch.float64)
    assert "about 1e-01 is rounding in torch.float32" in low
    assert "about 2e-10 is rounding in torch.float64" in high
    rounding.gain = 100.0
    assert rounding.notes(torch.float32) == []


def test_weights_and_input_stay_as_they_are() -> None:
    w, x = W.clone(), X.clone()
    Rounding().explains(0.0, steep, Weights({"w": w}, {}), x)
    assert torch.equal(w, W)
    assert torch.equal(x, X)
