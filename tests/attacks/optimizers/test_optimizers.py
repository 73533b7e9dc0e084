from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from leakwatch.attacks.optimizers.first_order import (
    LBFGS,
    Adam,
    Momentum,
    Optimizer,
    make_optimizer,
    schedule,
)


def quadratics(attacks: int = 4, n: int = 6) -> tuple[Tensor, Tensor]:
    """Convex quadratics of different curvature: H (attacks, n, n) and minima."""
    generator = torch.Generator().manual_seed(0)
    m = torch.randn(attacks, n, n, generator=generator, dtype=torch.float64)
    h = m @ m.mT + 0.1 * torch.eye(n, dtype=torch.float64)
    return h, torch.randn(attacks, n, generator=generator, dtype=torch.float64)


def value_of(h: Tensor, minimum: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    d = z - minimum
    g = (h @ d[:, :, None])[:, :, 0]
    return 0.5 * (d * g).sum(1), g


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_steps_are_those_of_torch_for_each_attack(name: str) -> None:
    h, minimum = quadratics()
    z = torch.zeros_like(minimum)
    ours = make_optimizer(name, z)  # type: ignore[arg-type]
    leaves = [torch.zeros(6, dtype=torch.float64, requires_grad=True) for _ in h]
    build = {
        "adam": lambda p, lr: torch.optim.Adam([p], lr=lr),
        "sgd": lambda p, lr: torch.optim.SGD([p], lr=lr, momentum=0.9),
    }[name]
    rates = torch.tensor([0.1, 0.01, 0.05, 0.02], dtype=torch.float64)
    theirs = [build(p, float(lr)) for p, lr in zip(leaves, rates, strict=True)]
    for _ in range(30):
        z = ours.step(z, *value_of(h, minimum, z), rates)
        for i, (p, optimizer) in enumerate(zip(leaves, theirs, strict=True)):
            p.grad = value_of(h[i : i + 1], minimum[i : i + 1], p.detach()[None])[1][0]
            optimizer.step()
    torch.testing.assert_close(z, torch.stack([p.detach() for p in leaves]))


def test_signed_steps_forget_the_size_of_gradients() -> None:
    z = torch.zeros(2, 3, dtype=torch.float64)
    g = torch.tensor([[1e-9, -5.0, 0.0], [3.0, -1e5, 0.0]], dtype=torch.float64)
    for optimizer in (Adam(z, signed=True), Momentum(z, signed=True)):
        moved = optimizer.step(z.clone(), z[:, 0], g.clone(), torch.ones(2).double())
        torch.testing.assert_close(moved[0], moved[1])
        torch.testing.assert_close(
            moved[0], torch.tensor([-1.0, 1.0, 0.0]).double(), rtol=1e-6, atol=1e-6
        )


def test_lbfgs_finds_minima_of_quadratics_and_of_rosenbrock() -> None:
    h, minimum = quadratics()
    z = torch.zeros_like(minimum)
    lbfgs, rates = LBFGS(z, history=10), torch.ones(4, dtype=torch.float64)
    for _ in range(60):
        z = lbfgs.step(z, *value_of(h, minimum, z), rates)
    torch.testing.assert_close(z, minimum, rtol=1e-7, atol=1e-7)

    z = torch.tensor([[-1.2, 1.0], [2.0, -3.0]], dtype=torch.float64)
    lbfgs, rates = LBFGS(z), torch.ones(2, dtype=torch.float64)
    for _ in range(120):
        leaf = z.clone().requires_grad_()
        f = (1 - leaf[:, 0]) ** 2 + 100 * (leaf[:, 1] - leaf[:, 0] ** 2) ** 2
        z = lbfgs.step(z, f.detach(), torch.autograd.grad(f.sum(), leaf)[0], rates)
    torch.testing.assert_close(z, torch.ones_like(z), rtol=1e-6, atol=1e-6)


def test_lbfgs_steps_back_from_where_the_objective_is_nan() -> None:
    # −log(x) + x, defined for x > 0 only; the first trial leaps beyond zero.
    z = torch.tensor([[3.0], [0.5]], dtype=torch.float64)
    lbfgs = LBFGS(z)
    for _ in range(40):
        f = torch.where(z > 0, z - z.log(), torch.nan)[:, 0]
        g = torch.where(z > 0, 1 - 1 / z, torch.nan)
        z = lbfgs.step(z, f, g, torch.full((2,), 5.0, dtype=torch.float64))
    torch.testing.assert_close(z, torch.ones_like(z), rtol=1e-6, atol=1e-6)


def test_lbfgs_says_when_nothing_is_lower() -> None:
    z = torch.zeros(1, 2, dtype=torch.float64)
    lbfgs = LBFGS(z)
    for i in range(60):
        # Any step away is worse, although the gradient promises otherwise.
        value = torch.zeros(1) if i == 0 else torch.ones(1)
        z = lbfgs.step(z, value.double(), torch.ones(1, 2).double(), torch.ones(1))
    stalled = lbfgs.stalled()
    assert stalled is not None
    assert bool(stalled.all())


@pytest.mark.parametrize("name", ["adam", "sgd", "lbfgs"])
def test_attacks_do_not_feel_each_other(name: str) -> None:
    h, minimum = quadratics()

    def path(rows: list[int], drop_at: int | None = None) -> Tensor:
        z = torch.zeros(len(rows), 6, dtype=torch.float64)
        optimizer: Optimizer = make_optimizer(name, z)  # type: ignore[arg-type]
        left = list(rows)
        for i in range(25):
            lr = torch.full((len(left),), 0.05, dtype=torch.float64)
            z = optimizer.step(z, *value_of(h[left], minimum[left], z), lr)
            if i == drop_at:
                keep = torch.arange(1, len(left))
                optimizer.select(keep)
                z, left = z[keep], left[1:]
        return z[-1]

    alone = path([2])
    torch.testing.assert_close(path([0, 1, 3, 2]), alone, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(path([0, 1, 2], drop_at=9), alone, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["adam", "sgd", "lbfgs"])
def test_a_reset_forgets_even_nan(name: str) -> None:
    h, minimum = quadratics(2)
    z = torch.zeros_like(minimum)
    lr = torch.full((2,), 0.05, dtype=torch.float64)
    fresh: Optimizer = make_optimizer(name, z)  # type: ignore[arg-type]
    expected = fresh.step(z.clone(), *value_of(h, minimum, z), lr)
    used: Optimizer = make_optimizer(name, z)  # type: ignore[arg-type]
    for _ in range(3):
        value, g = value_of(h, minimum, z)
        if name != "lbfgs":
            g = torch.full_like(g, math.nan)
        used.step(z.clone(), value, g, lr)
    used.reset(torch.tensor([True, True]))
    found = used.step(z.clone(), *value_of(h, minimum, z), lr)
    torch.testing.assert_close(found, expected)


def test_schedules() -> None:
    cosine = schedule("cosine")
    assert cosine(0, 1000) == pytest.approx(0.02, rel=1e-3)
    assert cosine(500, 1000) == pytest.approx(0.5)
    assert cosine(1000, 1000) == pytest.approx(0.0, abs=1e-12)
    assert schedule("constant")(7, 9) == 1.0
    with pytest.raises(ValueError, match="unknown schedule 'linear'"):
        schedule("linear")  # type: ignore[arg-type]


def test_bad_optimizers_are_refused() -> None:
    z = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="unknown optimizer 'rmsprop'"):
        make_optimizer("rmsprop", z)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="signed=False"):
        make_optimizer("lbfgs", z, signed=True)
