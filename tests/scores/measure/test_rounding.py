"""Networks that lose digits of J themselves, by centring or rescaling their input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakwatch import GradientJacobian, score
from leakwatch.derivatives import GradientMap
from leakwatch.scores.measure.sample_spectrum import Precision

BLIND = ["lavp_l2_min", "lavp_cos_min", "lavp_fusion", "i2f", "i2f_psnr"]
SEEN = ["lavp_l2_max", "lavp_cos_max", "i2f_bayes_psnr"]
LABELS = torch.tensor([0, 1])


class Standardized(nn.Module):
    """(x − mean)/std of each sample: blind to brightness and to contrast."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)


def network(first: nn.Module, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(first, nn.Linear(16, 20), nn.Tanh(), nn.Linear(20, 3))


CASES = {
    "little contrast": (Standardized, 0.02, 0.9),
    "bright": (Standardized, 1.0, 290.0),
    "layer norm": (lambda: nn.LayerNorm(16), 1.0, 1000.0),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_directions_that_a_network_removes_are_never_resolved(
    case: str, dtype: torch.dtype, seed: int
) -> None:
    first, contrast, brightness = CASES[case]
    net = network(first(), seed)
    x = torch.rand(2, 16) * contrast + brightness
    found = score(net, x, LABELS, noise_std=1e-3, dtype=dtype)
    for name in BLIND:
        assert [s.word for s in found.status[name]] == ["unresolved"] * 2, name
        assert bool(found[name].isnan().all())
    for name in SEEN:
        assert bool(found.usable(name).all())


@pytest.mark.parametrize("case", CASES)
def test_the_measured_rounding_is_that_of_the_whole_jacobian(case: str) -> None:
    first, contrast, brightness = CASES[case]
    net = network(first(), 0)
    x = torch.rand(2, 16) * contrast + brightness
    single = GradientJacobian(GradientMap(net), x, LABELS)
    double = GradientJacobian(GradientMap(net, dtype=torch.float64), x, LABELS)
    for i in range(2):
        scale = float(single.scale[i])
        error = float((single.dense(i).double() - double.dense(i)).norm()) / scale
        # Three random directions of 16: within a factor of 2.
        assert error / 2 < single.rounding(i) < 2 * error
        # In float64 the same digits are lost from more: 2^-52 instead of 2^-23.
        expected = single.rounding(i) * 2.0**-29
        assert double.rounding(i) == pytest.approx(expected, rel=1e-6)


def test_a_plain_network_keeps_its_digits() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 20), nn.Tanh(), nn.Linear(20, 3))
    x = torch.rand(2, 16)
    j = GradientJacobian(GradientMap(net), x, LABELS)
    for i in range(2):
        top = float(torch.linalg.eigvalsh(j.gram(i).h)[-1])
        measured = Precision.of_matrix(top, 16, 2.0**-23, j.rounding(i))
        assert measured == Precision.of_matrix(top, 16, 2.0**-23)
    found = score(net, x, LABELS, noise_std=1e-3)
    assert [s.word for s in found.status["lavp_l2_min"]] == ["ok", "ok"]


def test_the_largest_eigenvalue_by_products_knows_it_too() -> None:
    net = network(nn.LayerNorm(16), 0)
    x = torch.rand(2, 16) + 1e6
    found = score(net, x, LABELS, "lavp_l2_max", solver="lanczos")
    assert "ok" not in [s.word for s in found.status["lavp_l2_max"]]


def test_rounding_is_looked_at_again_where_it_may_matter_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[list[int] | None, int]] = []
    plain = GradientJacobian.roundings

    def noted(j: GradientJacobian, rows: Any = None, directions: int = 3) -> Tensor:
        asked.append((rows, directions))
        return plain(j, rows, directions)

    monkeypatch.setattr(GradientJacobian, "roundings", noted)
    x = torch.rand(3, 16) + torch.tensor([[0.0], [1e4], [0.0]])
    labels = torch.tensor([0, 1, 2])
    found = score(network(nn.LayerNorm(16), 0), x, labels, "lavp_l2_max")
    assert asked == [(None, 1), ([1], 3)]
    assert bool(found.usable("lavp_l2_max").all())


def test_a_jacobian_without_a_number_bounds_nothing() -> None:
    low, high = Precision(0.0, math.inf).bounds(torch.tensor([2.0, 1.0]), 2)
    assert low.tolist() == [0.0, 0.0]
    assert high.tolist() == [math.inf, math.inf]


class SinglePrecisionOnly(nn.Module):
    """Refuses float64, as modules with kernels of their own do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("only float32")
        out: Tensor = self.linear(x)
        return out.tanh()


def test_a_network_without_another_precision_is_scored_and_noted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    gradients = GradientMap(SinglePrecisionOnly(), path="vmap")
    j = GradientJacobian(gradients, torch.rand(2, 16), LABELS)
    with pytest.raises(RuntimeError, match="only float32"):
        j.rounding(0)
    found = score(SinglePrecisionOnly(), torch.rand(2, 16), LABELS, "lavp")
    assert bool(found.usable("lavp_l2_max").all())
    assert "assumed, not measured" in caplog.text


class Contrast(nn.Module):
    """Amplifies what is left of its input without its mean."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)


def test_samples_together_and_alone_have_the_same_rounding() -> None:
    net = network(Contrast(), 0)
    x = torch.rand(3, 16) + torch.tensor([[0.0], [100.0], [1e4]])
    labels = torch.tensor([0, 1, 2])
    j = GradientJacobian(GradientMap(net), x, labels)
    together = j.roundings()
    assert together.shape == (3,)
    assert j.roundings([]).shape == (0,)
    for i in range(3):
        # Rounding itself depends on how a batch is computed, by little.
        assert j.rounding(i) == pytest.approx(float(together[i]), rel=0.5)
    assert float(together[2]) > 100 * float(together[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_bad_sample_of_many_is_seen_when_only_the_largest_is_asked(
    dtype: torch.dtype,
) -> None:
    net = network(Contrast(), 0)
    x = torch.rand(8, 16, dtype=dtype)
    x[5] = x[5] * 1e-1 + (1e5 if dtype == torch.float32 else 1e14)
    labels = torch.arange(8) % 3
    for scores in (["lavp_l2_max"], ["lavp_l2_max", "lavp_l2_min"]):
        found = score(net, x, labels, scores, solver="lanczos", dtype=dtype)
        words = [s.word for s in found.status["lavp_l2_max"]]
        assert words[5] != "ok"
        assert words[:5] + words[6:] == ["ok"] * 7


def test_the_largest_alone_costs_no_tangent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[torch.dtype] = []
    jvp = GradientMap.jvp

    def counted(at: GradientMap, *args: Any) -> Tensor:
        taken.append(at.dtype)
        return jvp(at, *args)

    monkeypatch.setattr(GradientMap, "jvp", counted)
    net = network(nn.Identity(), 0)
    found = score(net, torch.rand(4, 16), torch.arange(4) % 3, ["lavp_l2_max"])
    assert [s.word for s in found.status["lavp_l2_max"]] == ["ok"] * 4
    # A difference of gradients tells what one would, and that the sample moves.
    assert not taken
