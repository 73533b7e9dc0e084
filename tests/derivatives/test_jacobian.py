from __future__ import annotations

import pytest
import torch
from cases import CASES, Case, dense_jacobian, mlp, relative
from torch.nn import functional as F

from leakwatch import GradientJacobian
from leakwatch.derivatives import GradientMap
from leakwatch.spectrum import SymmetricOperator, exact

BY_NAME = {case.name: case for case in CASES}
SOME = [
    BY_NAME[name] for name in ("lenet", "mlp", "attention", "lstm", "scalar-inputs")
]


def jacobian_of(case: Case, batch: int = 3, **options: object) -> GradientJacobian:
    x, y = case.data(batch)
    at = GradientMap(case.module(), dtype=torch.float64)
    return GradientJacobian(at, x, y, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", SOME, ids=[case.name for case in SOME])
def test_products_with_an_input_scale(case: Case) -> None:
    d_x = case.data(1)[0].numel()
    scale = torch.linspace(0.5, 4.0, d_x)
    j = jacobian_of(case, input_scale=scale)
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(3, d_x, generator=generator, dtype=torch.float64)
    u = torch.randn(3, j.shape[1], generator=generator, dtype=torch.float64)
    assert j.shape == (3, j.gradients.size, d_x)
    left = (u * j.matvec(v)).sum(1)
    torch.testing.assert_close(left, (j.rmatvec(u) * v).sum(1))
    torch.testing.assert_close(j.normalized_rmatvec(u) * j.scale[:, None], j.rmatvec(u))
    for i in range(3):
        g, dense = dense_jacobian(case.reference(), j.x[i], j.y[i])
        dense = dense * scale
        assert relative(j.dense(i), dense) < 1e-8
        assert relative(j.matvec(v)[i], dense @ v[i]) < 1e-8
        assert relative(j.rmatvec(u)[i], dense.T @ u[i]) < 1e-8
        assert relative(j.unit_gradient[i], g / g.norm()) < 1e-8
        assert float(j.norm[i]) == pytest.approx(float(g.norm()), rel=1e-8)
        h = dense.T @ dense
        assert relative(j.gram(i).h * j.scale[i] ** 2, h) < 1e-8
        assert relative(j.normal().matvec(v)[i] * j.scale[i] ** 2, h @ v[i]) < 1e-8
        along = dense.T @ g / g.norm()
        cosine = (h - torch.outer(along, along)) / g.norm() ** 2
        found = j.normal(cosine=True).matvec(v)[i] * (j.scale[i] / j.norm[i]) ** 2
        assert relative(found, cosine @ v[i]) < 1e-8


def test_hessian_of_the_cosine_distance() -> None:
    # LAVP, Theorem 4, against the second derivative of the distance itself.
    j = jacobian_of(BY_NAME["mlp"], 1)
    target = j.gradients(j.x, j.y)[0]
    module = BY_NAME["mlp"].reference()
    parameters = list(module.parameters())

    def slope(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        loss = F.cross_entropy(module(x), j.y)
        parts = torch.autograd.grad(loss, parameters, create_graph=True)
        g = torch.cat([part.reshape(-1) for part in parts])
        distance = 1 - F.cosine_similarity(g, target, dim=0)
        return torch.autograd.grad(distance, x)[0].reshape(-1)

    step, rows = 1e-6, []
    for unit in torch.eye(36, dtype=torch.float64):
        shift = step * unit.view_as(j.x)
        rows.append((slope(j.x + shift) - slope(j.x - shift)) / (2 * step))
    h = j.normal(cosine=True)
    found = torch.cat([h.matvec(unit[None]) for unit in torch.eye(36).double()])
    found = found * (j.scale / j.norm) ** 2
    assert relative(found, torch.stack(rows)) < 1e-6


def test_inactive_rows_are_skipped() -> None:
    x, y = BY_NAME["mlp"].data(4)
    seen: list[int] = []

    def criterion(m: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return F.cross_entropy(m(x), y, reduction="none")

    at = GradientMap(mlp(), criterion, dtype=torch.float64, path="loop")
    j = GradientJacobian(at, x, y)
    v = torch.randn(4, 36, generator=torch.Generator().manual_seed(0)).double()
    for operator in (j.normal(), j.normal(cosine=True)):
        assert isinstance(operator, SymmetricOperator)
        assert (operator.batch_size, operator.size) == (4, 36)
        assert operator.dtype == torch.float64
        whole = operator.matvec(v)
        active = torch.tensor([True, False, False, True])
        seen.clear()
        some = operator.matvec(v, active)
        assert seen == [2]  # one graph with these two, and no other forward
        torch.testing.assert_close(some[active], whole[active])
        assert not bool(some[~active].any())
        nothing = operator.matvec(v, torch.zeros(4, dtype=torch.bool))
        assert nothing.shape == v.shape
        assert not bool(nothing.any())
        torch.testing.assert_close(operator.matvec(v, torch.ones(4).bool()), whole)


def test_the_spectrum_of_the_operator_is_that_of_the_matrix() -> None:
    j = jacobian_of(BY_NAME["mlp"], 2)
    for cosine in (False, True):
        spectrum = exact(j.normal(cosine=cosine)).eigenvalues
        for i in range(2):
            found = j.gram(i)
            h = found.h - cosine * torch.outer(found.along, found.along)
            expected = torch.linalg.eigvalsh(h).flip(0)
            # `along` is J̃ᵀĝ and ‖g‖/scale is 1, so H̃_cos needs no division.
            torch.testing.assert_close(spectrum[i], expected, rtol=1e-8, atol=1e-12)


def test_a_sample_without_gradient() -> None:
    x, y = BY_NAME["mlp"].data(2, torch.float32)
    module = mlp()
    x[0] = 0
    for layer in (module[1], module[3]):
        torch.nn.init.zeros_(layer.bias)
    at = GradientMap(module, lambda m, x, y: m(x).square().sum(1))
    j = GradientJacobian(at, x, y)
    assert j.norm[0] == 0
    assert j.scale[0] == 1
    assert not bool(j.unit_gradient[0].any())
    assert j.gram(0).norm == 0
    assert bool(torch.isfinite(j.normal(cosine=True).matvec(x.reshape(2, -1))).all())
    assert float(j.norm[1]) > 0


def test_a_network_made_in_inference_mode() -> None:
    x, y = BY_NAME["mlp"].data(2)
    torch.manual_seed(0)
    with torch.inference_mode():
        module = mlp()
    j = GradientJacobian(GradientMap(module, dtype=torch.float64), x, y)
    twin = mlp()
    twin.load_state_dict(module.state_dict())
    expected = GradientJacobian(GradientMap(twin, dtype=torch.float64), x, y)
    v = torch.ones(2, 36, dtype=torch.float64)
    for cosine in (False, True):
        ours, theirs = (of.normal(cosine=cosine).matvec(v) for of in (j, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0.0)


def test_errors() -> None:
    x, y = BY_NAME["mlp"].data(2)
    at = GradientMap(mlp(), dtype=torch.float64)
    with pytest.raises(ValueError, match=r"one label per sample.*\(3,\)"):
        GradientJacobian(at, x, torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"input_scale.*\(36,\), got \(6, 6\)"):
        GradientJacobian(at, x, y, input_scale=torch.ones(6, 6))
    with pytest.raises(ValueError, match=r"v must have shape \(2, 36\)"):
        GradientJacobian(at, x, y).matvec(torch.ones(2, 35))
