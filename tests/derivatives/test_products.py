from __future__ import annotations

import logging

import pytest
import torch
from cases import CASES, CLASSES, Case, dense_jacobian, lenet, mlp, relative
from torch import Tensor, nn
from torch.nn import functional as F

from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.gram.gram import gram

BY_NAME = {case.name: case for case in CASES}


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def test_every_product_is_the_dense_jacobian(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = case.data(2)
    gradients = GradientMap(case.module(), dtype=torch.float64)
    with caplog.at_level(logging.WARNING, "leakwatch"):
        g = gradients(x, y)
    assert case.path in ("", gradients.path)
    assert ("sample by sample" in caplog.text) == (gradients.path == "loop")
    assert case.culprit in caplog.text
    assert len(gradients.notes) == len(case.notes)
    for word, note in zip(case.notes, gradients.notes, strict=True):
        assert word in note
    d_x, d_theta = x[0].numel(), gradients.size
    generator = torch.Generator().manual_seed(2)
    v = torch.randn(2, d_x, generator=generator, dtype=torch.float64)
    u = torch.randn(2, d_theta, generator=generator, dtype=torch.float64)
    pushed, pulled = gradients.jvp(x, y, v), gradients.vjp(x, y, u)
    losses = gradients.losses(x, y)
    for i in range(2):
        expected_g, jacobian = dense_jacobian(case.reference(), x[i], y[i])
        assert relative(g[i], expected_g) < 1e-8
        assert relative(pushed[i], jacobian @ v[i]) < 1e-8
        assert relative(pulled[i], jacobian.T @ u[i]) < 1e-8
        found = gram(gradients, x[i], y[i])
        assert relative(found.h, jacobian.T @ jacobian) < 1e-8
        direction = expected_g / expected_g.norm()
        assert relative(found.along, jacobian.T @ direction) < 1e-8
        assert found.norm == pytest.approx(float(expected_g.norm()), rel=1e-8)
        loss = F.cross_entropy(case.reference()(x[i : i + 1].clone()), y[i : i + 1])
        assert relative(losses[i], loss.detach()) < 1e-8


BATCHED = [c.name for c in CASES if c.path == "vmap"]
IN_FLOAT32 = ["lenet", "mlp-relu", "batchnorm", "attention", "groupnorm"]
IN_FLOAT32 += [c.name for c in CASES if c.name == "grid-sample"]


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [(name, torch.float64, 1e-10) for name in BATCHED]
    + [(name, torch.float32, 1e-5) for name in IN_FLOAT32],
)
def test_both_paths_agree(name: str, dtype: torch.dtype, tolerance: float) -> None:
    case = BY_NAME[name]
    x, y = case.data(2, dtype)
    by = {
        path: GradientMap(case.module(), dtype=dtype, path=path)
        for path in ("vmap", "loop")
    }
    u = torch.randn(2, by["loop"].size, generator=torch.Generator().manual_seed(0))
    v = x.reshape(2, -1)
    for product in (
        lambda at: at(x, y),
        lambda at: at.jvp(x, y, v),
        lambda at: at.vjp(x, y, u.to(dtype)),
        lambda at: at.dense(x[0], y[0], v),
    ):
        one, other = product(by["vmap"]), product(by["loop"])
        assert one.dtype == other.dtype == dtype
        assert relative(one, other) < tolerance


@pytest.mark.parametrize("name", ["lenet", "lstm", "attention"])
def test_chunks_do_not_matter(name: str) -> None:
    case = BY_NAME[name]
    x, y = case.data(5)
    results = []
    for chunk_size in (1, 3, None):
        at = GradientMap(case.module(), dtype=torch.float64, chunk_size=chunk_size)
        u = torch.ones(5, at.size).cumsum(1)
        v = torch.ones(5, x[0].numel()).cumsum(1)
        rows = at.dense(x[0], y[0], eye(x[0].numel()))
        results.append([at(x, y), at.jvp(x, y, v), at.vjp(x, y, u), rows])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


def test_agrees_with_the_jacobian_of_autograd_functional() -> None:
    module, (x, y) = lenet().double(), BY_NAME["lenet"].data(1)
    parameters = list(module.parameters())

    def g(at: Tensor) -> Tensor:
        loss = F.cross_entropy(module(at), y)
        parts = torch.autograd.grad(loss, parameters, create_graph=True)
        return torch.cat([part.reshape(-1) for part in parts])

    expected = torch.autograd.functional.jacobian(g, x).reshape(-1, 36)
    at = GradientMap(module, dtype=torch.float64)
    torch.testing.assert_close(
        at.dense(x[0], y[0], eye(36)), expected.T, rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("training", [torch.bfloat16, torch.float16, torch.float64])
def test_arithmetic_does_not_depend_on_the_training_precision(
    training: torch.dtype,
) -> None:
    case = BY_NAME["batchnorm"]
    x, y = case.data(2, torch.float32)
    module = case.module().to(training)
    rounded = case.module().to(training).double().eval()
    at = GradientMap(module, dtype=torch.float64)
    g, jacobian = dense_jacobian(rounded, x[0].double(), y[0])
    assert at(x, y).dtype == torch.float64
    assert relative(at(x.to(training), y)[0].float(), g) < 0.5
    assert relative(at.dense(x[0], y[0], eye(36)).T, jacobian) < 1e-8
    assert GradientMap(module)(x, y).dtype == torch.float32
    assert module.head.weight.dtype == training


def test_weights_scale_the_loss() -> None:
    x, y = BY_NAME["mlp"].data(3)
    w = torch.tensor([1.0, 0.5, 1e3])
    v = x.reshape(3, -1)
    for path in ("vmap", "loop"):
        at = GradientMap(mlp(), dtype=torch.float64, path=path)
        u = at(x, y)
        for weighted, plain in (
            (at(x, y, w), at(x, y)),
            (at.jvp(x, y, v, w), at.jvp(x, y, v)),
            (at.vjp(x, y, u, w), at.vjp(x, y, u)),
        ):
            torch.testing.assert_close(weighted, w[:, None] * plain)
        torch.testing.assert_close(
            at.dense(x[1], y[1], v, w[1]), 0.5 * at.dense(x[1], y[1], v)
        )


def test_a_criterion_may_use_any_target_and_output() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.net(x), x

    x, _ = BY_NAME["mlp"].data(2)
    target = torch.randn(2, CLASSES, dtype=torch.float32)
    module = Pair()
    at = GradientMap(
        module,
        lambda m, x, y: (m(x)[0] - y).square().sum(1),
        dtype=torch.float64,
    )
    module = module.double()
    for i in range(2):
        g, jacobian = dense_jacobian(
            module.net, x[i], target[i].double(), lambda o, t: (o - t).square().sum()
        )
        assert relative(at(x, target)[i], g) < 1e-10
        assert relative(at.dense(x[i], target[i], eye(36)).T, jacobian) < 1e-10


def test_a_criterion_that_is_a_module_shares_its_parameters() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(module(x) * self.scale, y, reduction="none")

    x, y = BY_NAME["mlp"].data(2)
    module, criterion = mlp(), Scaled()
    at = GradientMap(module, criterion, dtype=torch.float64)
    both = nn.ModuleList([module, criterion]).double()
    assert at.size == sum(p.numel() for p in both.parameters())
    loss = criterion(module, x[:1], y[:1]).sum()
    expected = torch.autograd.grad(loss, list(both.parameters()))
    torch.testing.assert_close(
        at(x, y)[0], torch.cat([part.reshape(-1) for part in expected])
    )


def test_tensors_that_a_criterion_closes_over_are_constants() -> None:
    x, y = BY_NAME["mlp"].data(2)
    outside = nn.Parameter(torch.tensor(3.0))
    module = mlp()
    plain = GradientMap(module, dtype=torch.float64)
    at = GradientMap(
        module,
        lambda m, x, y: outside * F.cross_entropy(m(x), y, reduction="none"),
        dtype=torch.float64,
    )
    assert at.size == plain.size
    torch.testing.assert_close(at(x, y), 3 * plain(x, y))
    assert outside.grad is None
