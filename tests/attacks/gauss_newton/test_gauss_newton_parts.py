"""The parts of the second-order attack against dense float64 computations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import dense_jacobian
from torch import Tensor, nn
from torch.nn import functional as F

from leakwatch.attacks import PixelScale
from leakwatch.attacks.gauss_newton.objective import (
    PosteriorObjective,
    fixed_logit_gradient,
)
from leakwatch.attacks.gauss_newton.smoothed_relu import SmoothedKinks
from leakwatch.attacks.gauss_newton.steps import DenseSteps, Iterates, MatrixFreeSteps
from leakwatch.attacks.gauss_newton.subproblems import (
    Product,
    conjugate_gradients,
)
from leakwatch.attacks.labels.last_layer import logit_slopes
from leakwatch.derivatives import GradientMap

from .gauss_newton_problems import CLASSES, PIXELS, SHAPE, net, problem, samples

ROWS = torch.arange(2)


def spd(n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(n, n, generator=generator, dtype=torch.float64)
    return a @ a.T + 0.01 * torch.eye(n, dtype=torch.float64)


def objective(
    images: int = 1, noise_std: float = 0.0, **more: object
) -> PosteriorObjective:
    gradients, shared, _ = problem(2 * images, noise_std=noise_std, images=images)
    assert shared.labels is not None
    return PosteriorObjective(
        gradients,
        shared.gradient,
        shared.labels,
        sample_shape=SHAPE,
        pixels=PIXELS,
        images=images,
        noise_std=noise_std,
        **more,  # type: ignore[arg-type]
    )


def somewhere(o: PosteriorObjective, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(2, o.size, generator=generator, dtype=torch.float64)


class TestConjugateGradients:
    def test_solves_on_the_free_pixels_as_a_dense_solver_does(self) -> None:
        h = torch.stack([spd(9, 0), spd(9, 1), spd(9, 2)])
        b = torch.randn(
            3, 9, generator=torch.Generator().manual_seed(3), dtype=torch.float64
        )
        shift = torch.tensor([0.1, 0.5, 2.0], dtype=torch.float64)
        free = torch.ones(3, 9, dtype=torch.bool)
        free[1, ::2] = False
        found, reached = conjugate_gradients(
            lambda rows, v: torch.einsum("rij,rj->ri", h[rows], v),
            b,
            shift,
            free,
            tolerance=torch.full((3,), 1e-13, dtype=torch.float64),
            most=60,
        )
        assert bool(reached.all())
        for i in range(3):
            k = free[i]
            m = h[i][k][:, k] + shift[i] * torch.eye(int(k.sum()), dtype=torch.float64)
            expected = torch.zeros(9, dtype=torch.float64)
            expected[k] = torch.linalg.solve(m, b[i][k])
            torch.testing.assert_close(found[i], expected, rtol=1e-9, atol=1e-11)

    def test_an_approximate_inverse_saves_iterations(self) -> None:
        """(H + D)v = b with D over ten orders of magnitude, and D⁻¹ known."""
        h = torch.stack([spd(30, 0), spd(30, 1)])
        d = torch.logspace(-2, 8, 30, dtype=torch.float64)
        b = torch.ones(2, 30, dtype=torch.float64)
        free = torch.ones(2, 30, dtype=torch.bool)
        free[1, ::3] = False

        def solved(inverse: Product | None) -> tuple[Tensor, Tensor]:
            return conjugate_gradients(
                lambda rows, v: torch.einsum("rij,rj->ri", h[rows], v) + d * v,
                b,
                torch.zeros(2, dtype=torch.float64),
                free,
                tolerance=torch.full((2,), 1e-9, dtype=torch.float64),
                most=40,
                inverse=inverse,
            )

        scale = float(h.diagonal(dim1=1, dim2=2).mean())
        found, reached = solved(lambda _, v: v / (d + scale))
        assert bool(reached.all())
        assert not bool(solved(None)[1].any())
        for i in range(2):
            k = free[i]
            m = (h[i] + torch.diag(d))[k][:, k]
            expected = torch.zeros(30, dtype=torch.float64)
            expected[k] = torch.linalg.solve(m, b[i][k])
            torch.testing.assert_close(found[i], expected, rtol=1e-6, atol=1e-9)

    def test_a_row_that_breaks_down_keeps_its_last_good_value(self) -> None:
        h = torch.stack([spd(4, 0), torch.full((4, 4), torch.nan).double()])
        b = torch.ones(2, 4, dtype=torch.float64)
        found, reached = conjugate_gradients(
            lambda rows, v: torch.einsum("rij,rj->ri", h[rows], v),
            b,
            torch.zeros(2, dtype=torch.float64),
            torch.ones(2, 4, dtype=torch.bool),
            tolerance=torch.full((2,), 1e-12, dtype=torch.float64),
            most=40,
        )
        assert reached.tolist() == [True, False]
        torch.testing.assert_close(h[0] @ found[0], b[0], rtol=1e-8, atol=1e-9)
        assert found[1].tolist() == [0.0] * 4


class TestObjective:
    @pytest.mark.parametrize("images", [1, 2])
    def test_products_and_gram_are_those_of_the_dense_jacobian(
        self, images: int
    ) -> None:
        o = objective(images)
        p, zero = somewhere(o), torch.zeros(2, dtype=torch.float64)
        _, shared, _ = problem(2 * images, images=images)
        assert shared.labels is not None
        v = somewhere(o, 6)
        for i in range(2):
            x = PIXELS.to_input(p[i].view(images, *SHAPE))
            parts = [
                dense_jacobian(net().double(), xi, yi)
                for xi, yi in zip(x, shared.labels[i], strict=True)
            ]
            g = torch.stack([part[0] for part in parts]).mean(0)
            j = torch.cat([part[1] for part in parts], 1) / 0.25 / images
            length = shared.gradient[i].norm()
            r = (g - shared.gradient[i]) / length
            j = j / length
            close = {"rtol": 1e-9, "atol": 1e-12}
            residual = o.residual(ROWS, p)
            torch.testing.assert_close(residual[i], r, **close)
            torch.testing.assert_close(
                o.slope(ROWS, p, residual, zero)[i], j.T @ r, **close
            )
            torch.testing.assert_close(o.push(ROWS, p, v, zero)[i], j @ v[i], **close)
            torch.testing.assert_close(
                o.pull(ROWS, p, residual, zero)[i], j.T @ r, **close
            )
            torch.testing.assert_close(o.gram(i, p[i], zero[i]), j.T @ j, **close)

    def test_slope_of_the_posterior_is_the_derivative_of_its_value(self) -> None:
        o = objective(noise_std=0.05, prior_std=0.3, prior_mean=torch.full(SHAPE, 0.4))
        p, v = somewhere(o), somewhere(o, 8)
        zero, h = torch.zeros(2, dtype=torch.float64), 1e-5

        def value(q: Tensor) -> Tensor:
            return o.value(ROWS, q, o.residual(ROWS, q))

        expected = (value(p + h * v) - value(p - h * v)) / (2 * h)
        slope = o.slope(ROWS, p, o.residual(ROWS, p), zero)
        torch.testing.assert_close((slope * v).sum(1), expected, rtol=1e-6, atol=1e-9)

    def test_fixed_slopes_give_the_shared_gradient_at_the_truth(self) -> None:
        gradients, shared, x = problem()
        _, y = samples(2)
        slopes = logit_slopes(gradients, shared, y)
        assert slopes is not None
        with torch.no_grad():
            logits = net().double()(x)
        expected = logits.softmax(1) - F.one_hot(y, CLASSES)
        torch.testing.assert_close(slopes, expected, rtol=1e-9, atol=1e-12)
        fixed = GradientMap(net(), fixed_logit_gradient, dtype=torch.float64)
        torch.testing.assert_close(
            fixed(x, slopes), shared.gradient, rtol=1e-9, atol=1e-12
        )

    @pytest.mark.parametrize(
        "module",
        [
            nn.Sequential(nn.Flatten(), nn.Linear(36, 4, bias=False)),
            nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.Softmax(1)),
        ],
    )
    def test_no_slopes_where_the_logits_have_no_bias(self, module: nn.Module) -> None:
        from leakwatch.attacks import SharedGradient

        gradients = GradientMap(module, dtype=torch.float64)
        x, y = samples(2)
        shared = SharedGradient.of(gradients, x, y)
        assert logit_slopes(gradients, shared, y) is None


class TestSteps:
    def point(self, o: PosteriorObjective) -> Iterates:
        p = somewhere(o)
        r, zero = o.residual(ROWS, p), torch.zeros(2, dtype=torch.float64)
        return Iterates(ROWS, p, r, o.slope(ROWS, p, r, zero), zero)

    @pytest.mark.parametrize("noise_std", [0.0, 0.1])
    def test_matrix_free_and_dense_agree(self, noise_std: float) -> None:
        o = objective(noise_std=noise_std, prior_std=0.3)
        at = self.point(o)
        dense = DenseSteps(o)
        mean = torch.stack(
            [o.gram(i, at.p[i], at.width[i]).diagonal().mean() for i in range(2)]
        )
        free = MatrixFreeSteps(o, products=400, forcing=1e-12)
        estimate = free.mean_diagonal(at)
        damping = torch.tensor([0.1, 1e-3], dtype=torch.float64)
        p1, predicted1 = dense.step(at, damping, None)
        # The dense way adds the prior to the diagonal, the other estimates it.
        weight = o.weight
        p2, predicted2 = free.step(at, damping * (mean + weight) / estimate, None)
        torch.testing.assert_close(p1, p2, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(predicted1, predicted2, rtol=1e-6, atol=1e-9)
        # And both solve the damped normal equations.
        for i in range(2):
            h = o.gram(i, at.p[i], at.width[i])
            h.diagonal().add_(weight[i] + damping[i] * (mean[i] + weight[i]))
            expected = at.p[i] - torch.linalg.solve(h, at.slope[i])
            torch.testing.assert_close(p1[i], expected, rtol=1e-8, atol=1e-9)

    def test_in_the_box_the_dense_step_is_the_better_and_both_descend(self) -> None:
        o = objective()
        at = self.point(o)
        free = MatrixFreeSteps(o, products=400, forcing=1e-10)
        damping = torch.full((2,), 1e-2, dtype=torch.float64)
        p1, predicted1 = DenseSteps(o).step(at, damping, (0.0, 1.0))
        p2, predicted2 = free.step(at, damping, (0.0, 1.0))
        for p in (p1, p2):
            assert float(p.min()) >= 0
            assert float(p.max()) <= 1
            assert int(((p == 0) | (p == 1)).sum()) > 0
        assert bool((predicted1 > 0).all())
        assert bool((predicted2 > 0).all())
        assert bool((predicted2 <= 1.05 * predicted1).all())

    def test_a_kept_matrix_is_stale_until_it_is_renewed(self) -> None:
        o = objective()
        at, dense = self.point(o), DenseSteps(o)
        damping = torch.ones(2, dtype=torch.float64)
        dense.step(at, damping, None)
        assert dense.stale(ROWS).tolist() == [False, False]
        dense.renew(ROWS[:1])
        dense.step(at, damping, None)
        assert dense.stale(ROWS).tolist() == [False, True]
        assert dense.formed == 3


RELUS: dict[str, Callable[[Tensor], Tensor]] = {
    "function": F.relu,
    "torch": torch.relu,
    "method": lambda z: z.relu(),
    "module": nn.ReLU(),
    "in place": lambda z: F.relu(z * 1, inplace=True),
    "in place module": lambda z: nn.ReLU(inplace=True)(z * 1),
    "method in place": lambda z: (z * 1).relu_(),
}


class TestKinks:
    @pytest.mark.parametrize("name", list(RELUS))
    def test_second_derivative_is_a_bump(self, name: str) -> None:
        z = torch.tensor([-1.0, -0.1, 0.2, 2.0], dtype=torch.float64)
        width = 0.5 * z.square().mean().sqrt()
        leaf = z.clone().requires_grad_()
        with SmoothedKinks(torch.tensor(0.5)) as mode:
            out = RELUS[name](leaf)
        assert mode.met
        slope = torch.autograd.grad(out.sum(), leaf, create_graph=True)[0]
        curve = torch.autograd.grad(slope.sum(), leaf)[0]
        torch.testing.assert_close(out, z.clamp_min(0), rtol=0, atol=0)
        torch.testing.assert_close(slope, (z > 0).double(), rtol=0, atol=0)
        expected = torch.distributions.Normal(0.0, width).log_prob(z).exp()
        torch.testing.assert_close(curve, expected, rtol=1e-12, atol=0)

    @pytest.mark.parametrize("inplace", [False, True])
    def test_a_leaky_relu_has_a_smaller_one(self, inplace: bool) -> None:
        z = torch.tensor([-1.0, 0.3], dtype=torch.float64)
        curves = []
        for f in (F.relu, lambda t: F.leaky_relu(t * 1, 0.2, inplace=inplace)):
            leaf = z.clone().requires_grad_()
            with SmoothedKinks(torch.tensor(0.5)):
                out = f(leaf)
            slope = torch.autograd.grad(out.sum(), leaf, create_graph=True)[0]
            curves.append(torch.autograd.grad(slope.sum(), leaf)[0])
        torch.testing.assert_close(out, F.leaky_relu(z, 0.2), rtol=1e-15, atol=0)
        torch.testing.assert_close(curves[1], 0.8 * curves[0], rtol=1e-12, atol=0)

    def relu_objective(self) -> PosteriorObjective:
        gradients, shared, _ = problem(2, nn.ReLU)
        assert shared.labels is not None
        return PosteriorObjective(
            gradients,
            shared.gradient,
            shared.labels,
            sample_shape=SHAPE,
            pixels=PIXELS,
        )

    def test_width_zero_is_the_exact_jacobian(self) -> None:
        o = self.relu_objective()
        p, v = somewhere(o), somewhere(o, 6)
        zero = torch.zeros(2, dtype=torch.float64)
        o.residual(ROWS, p)
        assert o.kinked
        gradients, shared, _ = problem(2, nn.ReLU)
        assert shared.labels is not None
        x = PIXELS.to_input(p.view(2, *SHAPE))
        expected = gradients.jvp(x, shared.labels[:, 0], v / 0.25)
        expected = expected / shared.gradient.norm(dim=1, keepdim=True)
        torch.testing.assert_close(
            o.push(ROWS, p, v, zero), expected, rtol=1e-9, atol=1e-12
        )

    def test_each_attack_has_its_own_width_and_the_transpose_fits(self) -> None:
        o = self.relu_objective()
        p, v = somewhere(o), somewhere(o, 6)
        o.residual(ROWS, p)
        width = torch.tensor([0.0, 0.3], dtype=torch.float64)
        both = o.push(ROWS, p, v, width)
        for i in range(2):
            alone = o.push(
                ROWS[i : i + 1], p[i : i + 1], v[i : i + 1], width[i : i + 1]
            )
            torch.testing.assert_close(both[i], alone[0], rtol=1e-10, atol=1e-13)
            h = o.gram(i, p[i], width[i])
            torch.testing.assert_close(
                v[i] @ h @ v[i], both[i].square().sum(), rtol=1e-9, atol=1e-12
            )
        u = torch.randn(both.shape, generator=torch.Generator().manual_seed(1)).double()
        torch.testing.assert_close(
            (o.pull(ROWS, p, u, width) * v).sum(1),
            (u * both).sum(1),
            rtol=1e-9,
            atol=1e-11,
        )

    def test_jacobian_of_one_layer_in_closed_form(self) -> None:
        """∂(v_i [z_i > 0] x_j)/∂x_k = v_i (bump(z_i) W_ik x_j + [z_i > 0] δ_jk)."""
        layers = nn.Sequential(
            nn.Linear(3, 5, bias=False), nn.ReLU(), nn.Linear(5, 2, bias=False)
        ).double()
        x = torch.tensor([0.3, -0.7, 0.2], dtype=torch.float64)
        w, c = layers[0].weight.detach(), torch.tensor([[0.5, -1.0]]).double()
        v = (c @ layers[2].weight.detach())[0]
        o = PosteriorObjective(
            GradientMap(layers, dtype=torch.float64),
            torch.ones(1, 25, dtype=torch.float64),
            c[:, None],
            criterion=fixed_logit_gradient,
            sample_shape=(3,),
            pixels=PixelScale(),
        )
        width = torch.tensor([0.4], dtype=torch.float64)
        o.residual(ROWS[:1], x[None])
        columns = torch.cat(
            [o.push(ROWS[:1], x[None], e[None], width) for e in torch.eye(3).double()]
        )
        z = w @ x
        spread = 0.4 * z.square().mean().sqrt()
        bump = torch.distributions.Normal(0.0, spread).log_prob(z).exp()
        step = (z > 0).double()
        expected = torch.einsum("i,i,ik,j->ijk", v, bump, w, x)
        expected += torch.einsum("i,i,jk->ijk", v, step, torch.eye(3).double())
        found = columns[:, :15].T.view(5, 3, 3) * torch.ones(25).norm()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)

    def test_explains_differences_of_gradients_that_the_jacobian_does_not(self) -> None:
        """Where many units share a weight: one jump is random, their sum is not."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            wide = nn.Sequential(
                nn.Conv2d(1, 6, 3),
                nn.ReLU(),
                nn.Conv2d(6, 6, 3),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(6, 3),
            ).double()
        generator = torch.Generator().manual_seed(3)
        p = torch.rand(1, 400, generator=generator, dtype=torch.float64)
        o = PosteriorObjective(
            GradientMap(wide, dtype=torch.float64),
            torch.ones(1, sum(q.numel() for q in wide.parameters())).double(),
            torch.tensor([[[1.0, -0.5, -0.5]]]).double(),
            criterion=fixed_logit_gradient,
            sample_shape=(1, 20, 20),
            pixels=PixelScale(),
        )
        one = ROWS[:1]
        r, left = o.residual(one, p), {0.0: 0.0, 0.05: 0.0}
        for _ in range(20):
            e = 0.02 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
            change = o.residual(one, p + e) - r
            for width in left:
                guess = o.push(one, p, e, torch.tensor([width], dtype=torch.float64))
                left[width] += float((change - guess).square().sum())
        assert left[0.05] < 0.8 * left[0.0]
