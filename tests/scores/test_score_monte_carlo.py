"""Closed forms against the mean over draws, within three standard errors."""

from __future__ import annotations

import torch
from score_problems import Problem
from torch import Tensor

from leakwatch.scores import score

DRAWS, NOISE, EPSILON = 2000, 1e-2, 1e-4


def agrees(closed_form: Tensor, squares: Tensor) -> None:
    """The root mean square of a score against squared norms of single draws."""
    mean, error = squares.mean(), squares.std() / DRAWS**0.5
    assert float(error / mean) < 0.2  # otherwise nothing is tested
    assert abs(float(closed_form) ** 2 - float(mean)) <= 3 * float(error)


def test_expected_i2f(problem: Problem) -> None:
    generator = torch.Generator().manual_seed(11)
    results = [
        score(
            problem.net,
            problem.pixels,
            problem.y,
            ["i2f", "i2f_lb", "i2f_nom"],
            noise_std=NOISE,
            epsilon=epsilon,
            dtype=torch.float64,
        )
        for epsilon in (0.0, EPSILON)
    ]
    for i, o in enumerate(problem.oracles):
        delta = NOISE * torch.randn(DRAWS, len(o.g), generator=generator).double()
        pulled = delta @ o.j
        for result, epsilon in zip(results, (0.0, EPSILON), strict=True):
            damped = o.h + epsilon * torch.eye(problem.d_x).double()
            moved = torch.linalg.solve(damped, pulled.T)
            agrees(result["i2f"][i], moved.square().sum(0))
        agrees(results[0]["i2f_nom"][i], pulled.square().sum(1))
        top = torch.linalg.matrix_norm(o.j, 2) ** 2
        agrees(results[0]["i2f_lb"][i], (pulled / top).square().sum(1))


def test_expected_error_of_the_posterior_mean(problem: Problem) -> None:
    """Draws of image and noise through the linear channel, estimated one by one."""
    generator = torch.Generator().manual_seed(12)
    spread, centre = 0.2, 0.5
    result = score(
        problem.net,
        problem.pixels,
        problem.y,
        "i2f_bayes",
        noise_std=NOISE,
        prior_std=spread,
        dtype=torch.float64,
    )
    for i, o in enumerate(problem.oracles):
        n = problem.d_x
        images = centre + spread * torch.randn(DRAWS, n, generator=generator).double()
        noise = NOISE * torch.randn(DRAWS, len(o.g), generator=generator).double()
        seen = images @ o.j.T + noise
        # The maximum of the posterior density, from its stationarity condition.
        right = seen @ o.j / NOISE**2 + centre / spread**2
        system = o.h / NOISE**2 + torch.eye(n).double() / spread**2
        guesses = torch.linalg.solve(system, right.T).T
        agrees(result["i2f_bayes"][i], (guesses - images).square().sum(1))
