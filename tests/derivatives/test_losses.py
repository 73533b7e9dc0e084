from __future__ import annotations

import pytest
import torch
from cases import relative
from torch import Tensor, nn
from torch.nn import functional as F

from leakwatch import GradientJacobian, cross_entropy
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.losses import classification_criterion

LOSSES = [1.0, 1e-1, 1e-3, 1e-5, 1e-7, 1e-10, 1e-15, 1e-20]


def logits_at(loss: float, classes: int = 4) -> Tensor:
    """One row of float64 logits whose cross-entropy for class 1 is ``loss``."""
    z = torch.tensor([[0.3, 0.0, -0.5, 0.1][:classes]], dtype=torch.float64)
    others = z[0, [i for i in range(classes) if i != 1]].logsumexp(0)
    z[0, 1] = others - torch.tensor(loss, dtype=torch.float64).expm1().log()
    return z


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("classes", [2, 4])
def test_value_and_derivatives_against_closed_forms(loss: float, classes: int) -> None:
    z = logits_at(loss, classes).float()
    y = torch.tensor([1])
    # p from the rounded logits, so that only the formula's own error is left.
    others = [i for i in range(classes) if i != 1]
    m = z.double()[0, others].logsumexp(0) - z.double()[0, 1]
    miss = torch.sigmoid(m)
    share = z.double()[0, others].softmax(0)
    slope = torch.empty(classes, dtype=torch.float64)
    slope[1], slope[others] = -miss, miss * share
    hessian = torch.empty(classes, classes, dtype=torch.float64)
    p = slope.clone()
    hessian = torch.diag(p) - torch.outer(p, p)
    hit = torch.sigmoid(-m)
    hessian[1, 1] = hit * miss
    hessian[1, others] = hessian[others, 1] = -hit * miss * share
    value = cross_entropy(z, y)
    first = torch.func.grad(lambda q: cross_entropy(q, y).sum())(z)[0]
    second = torch.func.hessian(lambda q: cross_entropy(q, y).sum())(z)[0, :, 0]
    third = torch.autograd.functional.hessian(lambda q: cross_entropy(q, y).sum(), z)
    torch.testing.assert_close(value.double()[0], F.softplus(m), rtol=5e-6, atol=0.0)
    assert relative(first, slope) < 5e-6
    assert relative(second, hessian) < 5e-6
    assert relative(third[0, :, 0], hessian) < 5e-6


def test_equals_the_usual_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    z = 5 * torch.randn(50, 7, generator=generator, dtype=torch.float64)
    y = torch.arange(50) % 7
    expected = F.cross_entropy(z, y, reduction="none")
    torch.testing.assert_close(cross_entropy(z, y), expected, rtol=1e-9, atol=1e-14)
    far = torch.tensor([[0.0, 200.0, -1e4]], dtype=torch.float64, requires_grad=True)
    loss = cross_entropy(far, torch.tensor([2]))
    torch.testing.assert_close(loss, torch.tensor([10200.0], dtype=torch.float64))
    (slope,) = torch.autograd.grad(loss, far)
    torch.testing.assert_close(slope[0, 1:], torch.tensor([1.0, -1.0]).double())


class Confident(nn.Module):
    """A smooth network whose loss is set by one parameter that is not shared.

    Its margin is a sum of few terms near zero and one constant, so that rounding of
    the margin itself (4e-6 relative to the loss at 1e-20) is not what is measured.
    """

    def __init__(self, margin: float) -> None:
        super().__init__()
        self.a = nn.Linear(5, 6)
        self.b = nn.Linear(6, 3)
        shift = torch.tensor([0.0, round(margin * 4) / 4, 0.0])
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) + self.shift


@pytest.mark.parametrize("loss", LOSSES)
def test_jacobian_gram_in_float32(loss: float) -> None:
    torch.manual_seed(0)
    margin = -float(torch.tensor(loss, dtype=torch.float64).expm1().log())
    module = Confident(margin)
    x, y = torch.randn(2, 5), torch.tensor([1, 1])
    coarse = GradientJacobian(GradientMap(module), x, y)
    fine = GradientJacobian(GradientMap(module, dtype=torch.float64), x, y)
    assert 0.1 * loss < float(fine.gradients.losses(x, y)[0]) < 10 * loss
    v = torch.randn(2, 5)
    one, other = coarse.normal().matvec(v), fine.normal().matvec(v)
    for i in range(2):
        # In units of the gradient: what the cosine distance sees, at any loss.
        expected = fine.dense(i).T @ fine.dense(i) / fine.scale[i] ** 2
        assert relative(fine.gram(i).h, expected) < 1e-10
        found = coarse.gram(i).h * (coarse.scale[i] / coarse.norm[i]) ** 2
        assert relative(found, expected * (fine.scale[i] / fine.norm[i]) ** 2) < 1e-5
        ratio = (coarse.scale[i] / coarse.norm[i]) ** 2
        wanted = other[i] * (fine.scale[i] / fine.norm[i]) ** 2
        assert relative(one[i].double() * ratio, wanted) < 1e-5
    # H itself: what is left is the rounding of the margin, eps · margin.
    limit = 1e-5 + 4 * torch.finfo(torch.float32).eps * margin
    for i in range(2):
        absolute = coarse.gram(i).h * coarse.scale[i] ** 2
        assert relative(absolute, fine.gram(i).h * fine.scale[i] ** 2) < limit


def test_impossible_targets_give_nan_everywhere() -> None:
    z = torch.zeros(3, 4, requires_grad=True)
    loss = cross_entropy(z, torch.tensor([1, 4, -1]))
    assert loss.isnan().tolist() == [False, True, True]
    (slope,) = torch.autograd.grad(loss.sum(), z)
    assert slope.isnan().all(1).tolist() == [False, True, True]


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"\(batch, classes\).*got shape \(2, 1\)"):
        cross_entropy(torch.zeros(2, 1), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"got shape \(2, 3, 4\)"):
        cross_entropy(torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"\(2,\), but got target of shape \(2, 1\)"):
        cross_entropy(torch.zeros(2, 3), torch.zeros(2, 1, dtype=torch.long))
    with pytest.raises(ValueError, match=r"integer class indices, got torch.float32"):
        cross_entropy(torch.zeros(2, 3), torch.zeros(2))

    class Dict(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": x}

    with pytest.raises(TypeError, match=r"Dict.forward\(x\) returned a dict"):
        classification_criterion(Dict(), torch.zeros(2, 3), torch.zeros(2).long())
