"""Scores of weight updates against dense float64 formulas and closed forms."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from score_problems import CASES, Oracle
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from leakwatch import GradientJacobian, WeightUpdate
from leakwatch.derivatives import GradientMap
from leakwatch.scores import UpdateScores, score_update
from leakwatch.scores.settings import UNIFORM_STD
from leakwatch.scores.updates import evaluate
from leakwatch.scores.updates.joint import JointJacobian, joint_errors
from leakwatch.scores.updates.surrogate import Surrogate

TIGHT = {"rtol": 1e-7, "atol": 0.0}
N = 2


@dataclass(frozen=True)
class Problem:
    """Two clients with two samples each, and their dense Jacobians at α = 0.4."""

    net: nn.Module
    x: Tensor
    y: Tensor
    update: WeightUpdate
    alpha: float = 0.4
    solved: dict[int, list[Oracle]] = field(default_factory=dict)

    def weights(self, client: int) -> Tensor:
        return self.update.initial - (1 - self.alpha) * self.update.difference[client]

    def oracles(self, client: int) -> list[Oracle]:
        if client not in self.solved:
            with placed(self.net, self.weights(client)):
                self.solved[client] = [
                    Oracle(self.net, *sample)
                    for sample in zip(self.x[client], self.y[client], strict=True)
                ]
        return self.solved[client]


@contextmanager
def placed(net: nn.Module, weights: Tensor) -> Iterator[None]:
    own = parameters_to_vector(net.parameters()).detach().clone()
    vector_to_parameters(weights.clone(), net.parameters())
    yield
    vector_to_parameters(own, net.parameters())


@pytest.fixture(scope="module", params=CASES[:2], ids=lambda case: case.name)
def problem(request: pytest.FixtureRequest) -> Problem:
    case = request.param
    net = case.make().double()
    x, y = case.data(2 * N)
    w = parameters_to_vector(net.parameters()).detach().clone()
    generator = torch.Generator().manual_seed(3)
    moved = 0.05 * torch.randn(2, len(w), generator=generator, dtype=torch.float64)
    shaped = x.view(2, N, *case.shape), y.view(2, N)
    update = WeightUpdate(w, w + moved, shaped[1], case.shape, N)
    return Problem(net, *shaped, update)


def run(problem: Problem, **options: Any) -> UpdateScores:
    given = {"dtype": torch.float64, "alpha": problem.alpha, **options}
    return score_update(problem.net, problem.x, problem.y, problem.update, **given)


@pytest.fixture(scope="module")
def found(problem: Problem) -> UpdateScores:
    return run(problem)


def mean_gradient(oracles: list[Oracle]) -> Tensor:
    return torch.stack([o.g for o in oracles]).mean(0)


def mismatch(problem: Problem, client: int, oracles: list[Oracle]) -> Tensor:
    """By a least-squares solver that knows no formula for s."""
    g, d = mean_gradient(oracles), problem.update.difference[client]
    s = torch.linalg.lstsq(d[:, None], g[:, None]).solution[0, 0]
    return s * d - g


def test_surrogate(problem: Problem, found: UpdateScores) -> None:
    for client in range(2):
        oracles = problem.oracles(client)
        g, d = mean_gradient(oracles), problem.update.difference[client]
        delta = mismatch(problem, client, oracles)
        for column, expected in (
            (found.similarity, torch.cosine_similarity(g, d, 0)),
            (found.mismatch, delta.norm() / g.norm()),
            (found.noise_std, delta.square().mean().sqrt()),
            (found.alpha, torch.tensor(problem.alpha).double()),
        ):
            torch.testing.assert_close(column[client], expected, **TIGHT)


def test_every_number_has_a_status(found: UpdateScores) -> None:
    assert set(found.status) == set(found.numbers) == set(found)
    assert set(found.client_status) == set(found.client_numbers)
    words = {s.word for rows in found.status.values() for row in rows for s in row}
    words |= {s.word for row in found.client_status.values() for s in row}
    assert words == {"ok"}
    assert bool(found.usable("i2f").all())
    with pytest.raises(KeyError, match="no score 'i3f'"):
        found["i3f"]


def test_lavp_of_blocks(problem: Problem, found: UpdateScores) -> None:
    """Cosine as the Hessian of 1 − cos(g, g_ŵ(X)) in one sample, by autograd."""
    for client in range(2):
        oracles = problem.oracles(client)
        g = mean_gradient(oracles)
        for i, o in enumerate(oracles):
            l2 = torch.linalg.svdvals(o.j / N).square()
            rest = g - o.g / N
            cosine = torch.autograd.functional.hessian(
                lambda flat, o=o, rest=rest, g=g: (
                    1 - torch.cosine_similarity(rest + o.gradient(flat) / N, g, 0)
                ),
                o.pixels.flatten(),
            )
            ends = torch.linalg.eigvalsh(cosine)
            for name, expected in (
                ("lavp_l2_max", l2[0]),
                ("lavp_l2_min", l2[-1]),
                ("lavp_cos_max", ends[-1]),
                ("lavp_cos_min", ends[0]),
                ("lavp_fusion", (l2[0] * ends[0]).sqrt()),
            ):
                torch.testing.assert_close(found[name][client, i], expected, **TIGHT)


def test_lavp_of_all_samples(problem: Problem, found: UpdateScores) -> None:
    for client in range(2):
        oracles = problem.oracles(client)
        g = mean_gradient(oracles)
        j = torch.cat([o.j for o in oracles], 1) / N
        l2 = torch.linalg.svdvals(j).square()
        across = (j - torch.outer(g, g @ j) / (g @ g)) / g.norm()
        cosine = torch.linalg.svdvals(across).square()
        numbers = found.client_numbers
        for name, expected in (
            ("lavp_l2_max", l2[0]),
            ("lavp_l2_min", l2[-1]),
            ("lavp_cos_max", cosine[0]),
            ("lavp_cos_min", cosine[-1]),
        ):
            torch.testing.assert_close(
                numbers[name][client], expected, rtol=1e-6, atol=0.0
            )


@pytest.mark.parametrize("epsilon", [0.0, 1e-5])
def test_i2f_of_blocks(problem: Problem, epsilon: float) -> None:
    found = run(problem, scores="i2f", epsilon=epsilon, joint=False)
    for client in range(2):
        oracles = problem.oracles(client)
        delta = mismatch(problem, client, oracles)
        for i, o in enumerate(oracles):
            j = o.j / N
            h = j.T @ j + epsilon * torch.eye(j.shape[1]).double()
            error = torch.linalg.solve(h, j.T @ delta).norm()
            torch.testing.assert_close(found["i2f"][client, i], error, **TIGHT)
            best = estimate(j, delta, o.pixels.flatten() - 0.5)
            torch.testing.assert_close(
                found["i2f_bayes"][client, i], best.norm(), **TIGHT
            )


def estimate(j: Tensor, delta: Tensor, offset: Tensor) -> Tensor:
    """Error of the most probable X, as the solution of a stacked least-squares system.

    ‖J e − δ‖²/s² + ‖e + offset‖²/R², where s is δ's energy per coordinate.
    """
    s, n = delta.square().mean().sqrt(), j.shape[1]
    a = torch.cat([j / s, torch.eye(n).double() / UNIFORM_STD])
    b = torch.cat([delta / s, -offset / UNIFORM_STD])
    solution: Tensor = torch.linalg.lstsq(a, b[:, None]).solution[:, 0]
    return solution


@pytest.mark.parametrize("max_memory", [2048.0, 1e-3])
def test_joint_error_of_each_sample(problem: Problem, max_memory: float) -> None:
    """Dense, and by products when the Jacobian may not be kept."""
    found = run(
        problem,
        blocks=False,
        max_memory=max_memory,
        products=N * problem.x[0, 0].numel(),
    )
    for client in range(2):
        oracles = problem.oracles(client)
        delta = mismatch(problem, client, oracles)
        j = torch.cat([o.j for o in oracles], 1) / N
        offset = problem.x[client].flatten() - 0.5
        errors = estimate(j, delta, offset).view(N, -1).norm(dim=1)
        dense = max_memory > 1
        torch.testing.assert_close(
            found["joint_i2f_bayes"][client],
            errors,
            rtol=1e-6 if dense else 1e-3,
            atol=0.0,
        )
        psnr = 20 * torch.log10(math.sqrt(o_size(problem)) / errors)
        torch.testing.assert_close(
            found["joint_i2f_bayes_psnr"][client], psnr, rtol=1e-3, atol=0.0
        )
        top = torch.linalg.matrix_norm(j, 2) ** 2
        torch.testing.assert_close(
            found.client_numbers["lavp_l2_max"][client], top, rtol=1e-6, atol=0.0
        )


def o_size(problem: Problem) -> int:
    return problem.x[0, 0].numel()


def test_products_say_when_they_were_too_few(problem: Problem) -> None:
    few = {"max_memory": 1e-3, "products": 2, "noise_std": 1e-4}
    found = run(problem, blocks=False, **few)
    statuses = found.status["joint_i2f_bayes"][0]
    assert all(s.word == "not converged" and "raise" in s.reason for s in statuses)
    assert not bool(found.usable("joint_i2f_bayes").any())
    lost = found.client_status["i2f_bayes"][0]
    assert lost.word == "not computed"
    assert "max_memory" in lost.reason


def test_one_sample_is_its_own_joint(problem: Problem) -> None:
    update = replace(
        problem.update, labels=None, samples=1, final=problem.update.final[:1]
    )
    found = score_update(
        problem.net,
        problem.x[:1, :1],
        problem.y[:1, :1],
        update,
        alpha=problem.alpha,
        dtype=torch.float64,
    )
    pair = found["joint_i2f_bayes"], found["i2f_bayes"]
    torch.testing.assert_close(*pair, rtol=1e-6, atol=0.0)
    for name, number in found.client_numbers.items():
        torch.testing.assert_close(number, found[name][:, 0], rtol=1e-6, atol=0.0)


def test_pixel_units(problem: Problem) -> None:
    """With a normalisation by std all errors are those of the pixels."""
    if problem.x.shape[2] != 1:
        pytest.skip("one channel")
    inputs = (problem.x - 0.3) / 0.25
    found = score_update(
        problem.net,
        inputs,
        problem.y,
        problem.update,
        alpha=problem.alpha,
        mean=[0.3],
        std=[0.25],
        dtype=torch.float64,
    )
    with placed(problem.net, problem.weights(0)):
        oracles = [
            Oracle(problem.net, *sample, mean=(0.3,), std=(0.25,))
            for sample in zip(problem.x[0], problem.y[0], strict=True)
        ]
    delta = mismatch(problem, 0, oracles)
    j = torch.cat([o.j for o in oracles], 1) / N
    errors = estimate(j, delta, problem.x[0].flatten() - 0.5).view(N, -1).norm(dim=1)
    torch.testing.assert_close(found["joint_i2f_bayes"][0], errors, rtol=1e-6, atol=0.0)
    top = torch.linalg.matrix_norm(oracles[0].j / N, 2) ** 2
    torch.testing.assert_close(found["lavp_l2_max"][0, 0], top, **TIGHT)


def test_a_stated_noise_takes_the_place_of_the_energy(problem: Problem) -> None:
    found = run(problem, scores=["i2f_bayes"], noise_std=1e-2, joint=False)
    o = problem.oracles(0)
    delta, j = mismatch(problem, 0, o), o[0].j / N
    damping = (1e-2 / UNIFORM_STD) ** 2
    h = j.T @ j + damping * torch.eye(j.shape[1]).double()
    offset = o[0].pixels.flatten() - 0.5
    error = torch.linalg.solve(h, j.T @ delta - damping * offset).norm()
    torch.testing.assert_close(found["i2f_bayes"][0, 0], error, **TIGHT)
    assert found.noise_std.tolist() == [1e-2, 1e-2]


def test_joint_operator_is_the_dense_jacobian(problem: Problem) -> None:
    with placed(problem.net, problem.weights(1)):
        at = GradientMap(problem.net, dtype=torch.float64)
        jacobian = GradientJacobian(at, problem.x[1], problem.y[1])
        g = at(problem.x[1], problem.y[1]).mean(0)
        unit = g / g.norm()
        dense = torch.cat([o.j for o in problem.oracles(1)], 1) / N
        for along, expected in (
            (None, dense),
            (unit, dense - torch.outer(unit, unit @ dense)),
        ):
            operator = JointJacobian(jacobian, along)
            assert (operator.rows, operator.size) == tuple(dense.shape)
            generator = torch.Generator().manual_seed(0)
            v = torch.randn(1, operator.size, generator=generator).double()
            u = torch.randn(1, operator.rows, generator=generator).double()
            close = {"rtol": 1e-9, "atol": 1e-12}
            torch.testing.assert_close(
                operator.forward(v)[0] * operator.scale, expected @ v[0], **close
            )
            torch.testing.assert_close(
                operator.backward(u)[0] * operator.scale, expected.T @ u[0], **close
            )


def test_clients_and_weights_are_left_alone(problem: Problem) -> None:
    """A client alone gets the numbers that it got among others; no weight moves."""
    before = [p.detach().clone() for p in problem.net.parameters()]
    places = [p.data_ptr() for p in problem.net.parameters()]
    found = run(problem)
    second = replace(
        problem.update,
        final=problem.update.final[1:],
        labels=problem.update.labels[1:] if problem.update.labels is not None else None,
    )
    alone = score_update(
        problem.net,
        problem.x[1:],
        problem.y[1:],
        second,
        alpha=problem.alpha,
        dtype=torch.float64,
    )
    for name in found:
        torch.testing.assert_close(alone[name][0], found[name][1], rtol=0.0, atol=0.0)
    for p, value, place in zip(problem.net.parameters(), before, places, strict=True):
        assert torch.equal(p, value)
        assert p.data_ptr() == place


def test_a_part_of_the_parameters(problem: Problem) -> None:
    """The last layer alone: rows of J that belong to others are gone."""
    names = [name for name, _ in problem.net.named_parameters()][-2:]
    size = sum(p.numel() for p in [*problem.net.parameters()][-2:])
    update = replace(
        problem.update,
        initial=problem.update.initial[-size:],
        final=problem.update.final[:, -size:],
    )
    found = score_update(
        problem.net,
        problem.x,
        problem.y,
        update,
        ["lavp_l2_max"],
        alpha=problem.alpha,
        parameters=names,
        dtype=torch.float64,
        joint=False,
    )
    own = problem.update.initial
    mixed = torch.cat([own[:-size], problem.weights(0)[-size:]])
    with placed(problem.net, mixed):
        oracle = Oracle(problem.net, problem.x[0, 0], problem.y[0, 0])
    top = torch.linalg.matrix_norm(oracle.j[-size:] / N, 2) ** 2
    torch.testing.assert_close(found["lavp_l2_max"][0, 0], top, **TIGHT)


# -- the surrogate -------------------------------------------------------------------


class Quadratic(nn.Module):
    """Losses ½ Σ a_j (w_j − x_j)²: the mean gradient is a(w − mean of x)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0, -1.0, 0.5]).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.w - x


CURVATURE = torch.tensor([1.0, 3.0, 0.2]).double()


def quadratic_loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (CURVATURE.to(x) * module(x).square()).sum(1)


def parallel_at(alpha: float) -> tuple[Quadratic, Tensor, WeightUpdate]:
    """An update Δ parallel to the gradient at αw_0 + (1−α)w_T and nowhere else.

    A(w_0 − (1−α)Δ − x̄) = cΔ.
    """
    net = Quadratic()
    x = torch.tensor([[[0.1, 0.2, 0.3], [0.5, 0.0, -0.1]]]).double()
    w = net.w.detach().clone()
    pull = CURVATURE * (w - x[0].mean(0))
    delta = pull / (0.8 + (1 - alpha) * CURVATURE)
    return net, x, WeightUpdate(w, (w - delta)[None], None, (3,), 2)


@pytest.mark.parametrize("alpha", [0.0, 0.237, 0.5, 0.81, 1.0])
def test_best_alpha_in_closed_form(alpha: float) -> None:
    net, x, update = parallel_at(alpha)
    y = torch.zeros(1, 2, dtype=torch.long)
    found = score_update(
        net,
        x,
        y,
        update,
        ["lavp_l2_max"],
        criterion=quadratic_loss,
        dtype=torch.float64,
    )
    assert float(found.alpha) == pytest.approx(alpha, abs=2e-3)
    assert float(found.similarity) == pytest.approx(1.0, abs=1e-5)
    # J_i/N = −A/N whatever w is.
    expected = torch.full((1, 2), float(CURVATURE.max() / 2) ** 2).double()
    torch.testing.assert_close(found["lavp_l2_max"], expected, rtol=1e-9, atol=0.0)


def test_no_mismatch_is_no_division_by_zero() -> None:
    net, x, update = parallel_at(0.5)
    y = torch.zeros(1, 2, dtype=torch.long)
    found = score_update(
        net, x, y, update, alpha=0.5, criterion=quadratic_loss, dtype=torch.float64
    )
    assert float(found.mismatch) < 1e-14 < float(found.noise_std) * 1e3
    # Of two samples only the mean is known: each is off by half their distance.
    assert float(found["i2f_bayes_psnr"].min()) > 200
    half = (x[0, 0] - x[0, 1]).norm().expand(1, 2) / 2
    torch.testing.assert_close(found["joint_i2f_bayes"], half, rtol=1e-9, atol=0.0)


def test_mismatch_is_orthogonal_to_the_update(problem: Problem) -> None:
    at = GradientMap(problem.net, dtype=torch.float64)
    surrogate = Surrogate(at, problem.update, 0)
    delta = surrogate.mismatch(problem.x[0], problem.y[0], problem.alpha).delta
    d = problem.update.difference[0]
    assert abs(float(delta @ d)) <= 1e-12 * float(delta.norm() * d.norm())


def test_weights_come_back_after_an_error(problem: Problem) -> None:
    surrogate = Surrogate(
        GradientMap(problem.net, dtype=torch.float64), problem.update, 0
    )
    before = [(p.data_ptr(), p.detach().clone()) for p in problem.net.parameters()]
    with pytest.raises(RuntimeError, match="stop"), surrogate.at(0.5):
        raise RuntimeError("stop")
    for p, (place, value) in zip(problem.net.parameters(), before, strict=True):
        assert p.data_ptr() == place
        assert torch.equal(p, value)


# -- other precision ----------------------------------------------------------------


def trained(
    lr: float, dtype: torch.dtype, module_dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Tensor, Tensor, WeightUpdate]:
    """A client that took 3 steps of gradient descent in ``dtype``."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 3)).to(module_dtype)
    for p in net.parameters():
        p.data = (torch.rand(p.shape, generator=generator) - 0.5).to(module_dtype)
    x, y = torch.rand(3, 4, generator=generator), torch.tensor([0, 1, 2])
    moving = copy.deepcopy(net).to(dtype)
    initial = parameters_to_vector(moving.parameters()).detach().clone()
    for _ in range(3):
        loss = nn.functional.cross_entropy(moving(x.to(dtype)), y)
        for p, g in zip(
            moving.parameters(),
            torch.autograd.grad(loss, [*moving.parameters()]),
            strict=True,
        ):
            p.data -= lr * g
    final = parameters_to_vector(moving.parameters()).detach()
    return net, x[None], y[None], WeightUpdate(initial, final[None], None, (4,), 3)


@pytest.mark.parametrize("alpha", [0.4, None])
@pytest.mark.parametrize(
    ("module_dtype", "dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float64),
        (torch.float32, torch.float64),
    ],
)
def test_the_modules_own_dtype_does_not_count(
    module_dtype: torch.dtype, dtype: torch.dtype, alpha: float | None
) -> None:
    net, x, y, update = trained(0.1, torch.float64, module_dtype)
    before = [(p, p.data_ptr(), p.detach().clone()) for p in net.parameters()]
    copied = copy.deepcopy(net).to(dtype)
    found, expected = (
        score_update(n, x, y, update, ["lavp", "i2f"], dtype=dtype, alpha=alpha)
        for n in (net, copied)
    )
    close = {"rtol": 1e-6 if dtype == torch.float32 else 1e-12, "atol": 0.0}
    for name in ("alpha", "similarity", "mismatch", "noise_std"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), **close
        )
    assert found.status == expected.status
    for name in found:
        torch.testing.assert_close(found[name], expected[name], equal_nan=True, **close)
    for p, (own, place, value) in zip(net.parameters(), before, strict=True):
        assert p is own
        assert p.data_ptr() == place
        assert torch.equal(p, value)


def test_a_mismatch_smaller_than_rounding_in_float32() -> None:
    """A tiny lr: w_0 − w_T is a gradient up to 1e-7 of it."""
    net, x, y, update = trained(1e-6, torch.float64)
    found, exact = (
        score_update(n, x, y, update, "i2f", dtype=dtype, alpha=0.5, joint=False)
        for n, dtype in (
            (net, torch.float32),
            (copy.deepcopy(net).double(), torch.float64),
        )
    )
    assert float(exact.mismatch) < 1e-6
    torch.testing.assert_close(found.mismatch, exact.mismatch, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(found["i2f"], exact["i2f"], rtol=1e-3, atol=0.0)


class NeverFloat64(nn.Linear):
    """A network that one precision is too much for."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("no kernel for float64")
        return super().forward(x).sigmoid()


def test_rounding_that_hides_the_mismatch_is_told() -> None:
    net, x, y, update = trained(1e-6, torch.float64)
    only = NeverFloat64(4, 3)
    only.load_state_dict({"weight": net[2].weight[:, :4], "bias": net[2].bias})
    w = parameters_to_vector(only.parameters()).detach().double()
    g = GradientMap(only)(x[0], y[0]).double().mean(0)
    tiny = replace(update, initial=w, final=(w - 1e-6 * g)[None])
    found = score_update(only, x, y, tiny, "i2f", alpha=1.0)
    large = score_update(only, x, y, replace(tiny, final=w[None] + 0.1), "i2f")
    assert float(found.mismatch) < 1e-5
    for name in found:
        told = {s.word for row in found.status[name] for s in row}
        assert told <= {"estimated", "unresolved", "not converged", "undefined"}
    assert any("as inexact as float32" in note for note in found.notes)
    assert {s.word for s in large.status["i2f_nom"][0]} == {"ok"}


def test_rounding_of_the_gradient_counts(problem: Problem) -> None:
    at = GradientMap(problem.net, dtype=torch.float64)
    found = Surrogate(at, problem.update, 0).mismatch(problem.x[0], problem.y[0], 0.4)
    assert 0 < found.uncertainty <= found.rounding < 1e-13
    assert found.uncertainty < 1e-13 * float(found.gradient.norm())
    mostly = replace(found, uncertainty=0.5 * float(found.delta.norm()))
    assert mostly.doubt == pytest.approx(0.5)
    assert not mostly.judged
    assert mostly.entry_error == 0 < found.entry_error


def test_errors_of_delta_reach_the_joint_errors() -> None:
    j = torch.eye(4).double()[None]
    delta, offset = torch.ones(4).double(), torch.zeros(2, 2).double()
    words = [
        joint_errors(j, delta, offset, scale=1.0, epsilon=1.0, uncertainty=u)[
            0
        ].status.word
        for u in (0.0, 0.01, 0.5, 9.0)
    ]
    assert words == ["ok", "ok", "estimated", "unresolved"]


# -- what is refused, and what fails -------------------------------------------------


def broken_input(problem: Problem) -> dict[str, Any]:
    x = problem.x.clone()
    x[1, 0].fill_(math.nan)
    return {"x": x}


def other_labels(problem: Problem) -> dict[str, Any]:
    return {"y": (problem.y + 1) % 10}


WRONG: dict[str, tuple[Callable[[Problem], dict[str, Any]], type[Exception], str]] = {
    "labels": (other_labels, ValueError, "labels of client 0 are not those"),
    "samples": (lambda p: {"x": p.x[:, :1]}, ValueError, "x must have shape"),
    "update": (lambda p: {"update": p.y}, TypeError, "must be a leakwatch"),
    "alpha kind": (lambda p: {"alpha": "x"}, TypeError, r"alpha must be .*'x' \(str"),
    "alpha flag": (lambda p: {"alpha": True}, TypeError, "alpha must be a number"),
    "x list": (lambda p: {"x": p.x.tolist()}, TypeError, "inputs .* got a list"),
    "y nothing": (lambda p: {"y": None}, TypeError, "labels .* got a NoneType"),
    "NaN": (broken_input, ValueError, "client 1: the input of sample 0 holds NaN"),
    "alpha": (lambda p: {"alpha": 1.5}, ValueError, r"alpha must lie in \[0, 1\]"),
    "nothing": (
        lambda p: {"blocks": False, "joint": False},
        ValueError,
        "there is no score",
    ),
    "mean": (lambda p: {"mean": [0.5]}, ValueError, "give both or neither"),
    "size": (
        lambda p: {
            "update": replace(
                p.update, initial=p.update.initial[1:], final=p.update.final[:, 1:]
            )
        },
        ValueError,
        "weights, but the module shares",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(problem: Problem, name: str) -> None:
    make, kind, text = WRONG[name]
    given: dict[str, Any] = {
        "x": problem.x,
        "y": problem.y,
        "update": problem.update,
        **make(problem),
    }
    with pytest.raises(kind, match=text):
        score_update(problem.net, dtype=torch.float64, **given)


def test_a_client_out_of_range_leaves_the_others(
    problem: Problem, found: UpdateScores
) -> None:
    """Weights so large that the Jacobian is beyond the range of float64."""
    final = problem.update.final.clone()
    final[0] = 1e300
    broken = replace(problem, update=replace(problem.update, final=final))
    mixed = run(broken)
    assert not bool(mixed.usable("joint_i2f_bayes")[0].any())
    for name in found:
        torch.testing.assert_close(mixed[name][1], found[name][1], rtol=0.0, atol=0.0)


def test_a_client_that_raises_leaves_the_others(
    problem: Problem, found: UpdateScores, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = evaluate.score_client

    def scored(*given: Any) -> Any:
        calls.append(len(calls))
        if calls == [0]:
            raise ArithmeticError("no such number")
        return real(*given)

    monkeypatch.setattr(evaluate, "score_client", scored)
    mixed = run(problem)
    assert set(mixed) == set(found)
    for name in found:
        texts = {str(s) for s in mixed.status[name][0]}
        assert all("failed: ArithmeticError: no such number" in t for t in texts)
        torch.testing.assert_close(mixed[name][1], found[name][1], rtol=0.0, atol=0.0)
    words = [s.word for s in mixed.client_status["lavp_l2_max"]]
    assert words == ["failed", "ok"]
    monkeypatch.setattr(evaluate, "score_client", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(problem)


def test_joint_errors_of_a_matrix() -> None:
    generator = torch.Generator().manual_seed(1)
    j = torch.randn(30, 12, generator=generator).double()
    delta = torch.randn(30, generator=generator).double()
    offset = torch.randn(4, 3, generator=generator).double()
    found = joint_errors(j[None], delta, offset, scale=2.0, epsilon=0.7, tol=1e-12)
    damped = 4 * j.T @ j + 0.7 * torch.eye(12).double()
    expected = torch.linalg.solve(damped, 2 * j.T @ delta - 0.7 * offset.flatten())
    torch.testing.assert_close(
        torch.tensor([v.number for v in found], dtype=torch.float64),
        expected.view(4, 3).norm(dim=1),
        rtol=1e-9,
        atol=0.0,
    )
    assert {v.status.word for v in found} == {"ok"}
