"""The integrated influence against Euler's rule by hand, and a path in closed form."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn.functional import cross_entropy

from leakwatch import GradientJacobian, score
from leakwatch.derivatives import GradientMap
from leakwatch.scores import Settings
from leakwatch.scores.measure.influence_path import follow

NOISE, PRIOR = 0.03, 0.3
MEAN, STD = [0.4], [0.5]


def mlp() -> nn.Module:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Flatten(), nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 4))
    for p in net.parameters():
        nn.init.uniform_(p, -1.0, 1.0)
    return net.double()


def problem(samples: int = 2) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    net = mlp()
    generator = torch.Generator().manual_seed(5)
    pixels = torch.rand(samples, 1, 3, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (samples,), generator=generator)
    size = sum(p.numel() for p in net.parameters())
    delta = NOISE * torch.randn(samples, size, generator=generator, dtype=torch.float64)
    return net, pixels, y, delta


def gradient_of_pixels(net: nn.Module, pixels: Tensor, label: Tensor) -> Tensor:
    """∇_θ of one sample's loss as a function of its pixels, flat."""
    weights = dict(net.named_parameters())

    def loss(at: dict[str, Tensor]) -> Tensor:
        x = (pixels.view(1, 1, 3, 3) - MEAN[0]) / STD[0]
        return cross_entropy(functional_call(net, at, (x,)), label[None])

    parts = torch.func.grad(loss)({k: v.detach() for k, v in weights.items()})
    return torch.cat([parts[k].flatten() for k in weights])


def euler(
    net: nn.Module,
    pixels: Tensor,
    label: Tensor,
    delta: Tensor,
    *,
    steps: int,
    mean: Tensor,
    covariance: Tensor,
) -> Tensor:
    """Displacement at the end of the path, from dense Jacobians in float64."""
    start = pixels.flatten()
    inverse = torch.linalg.inv(covariance)
    place = start.clone()
    for _ in range(steps):
        j = jacrev(lambda p: gradient_of_pixels(net, p, label))(place)
        right = j.T @ delta / NOISE**2 + inverse @ (mean - start)
        place = place + torch.linalg.solve(j.T @ j / NOISE**2 + inverse, right) / steps
    return place - start


def scored(
    net: nn.Module,
    pixels: Tensor,
    y: Tensor,
    delta: Tensor | None,
    **settings: object,
) -> tuple[Tensor, list[str]]:
    arguments: dict[str, object] = {
        "noise_std": NOISE,
        "delta": delta,
        **({} if "prior" in settings else {"prior_std": PRIOR}),
        "mean": MEAN,
        "std": STD,
        "dtype": torch.float64,
        "solver": "exact",
        **settings,
    }
    x = (pixels - MEAN[0]) / STD[0]
    found = score(net, x, y, ["i2f_bayes"], **arguments)  # type: ignore[arg-type]
    return found["i2f_bayes"], [s.word for s in found.status["i2f_bayes"]]


@pytest.mark.parametrize("steps", [2, 5])
def test_equals_eulers_rule_with_dense_jacobians(steps: int) -> None:
    net, pixels, y, delta = problem()
    mean = torch.full((9,), 0.2, dtype=torch.float64)
    numbers, _ = scored(
        net, pixels, y, delta, influence_steps=steps, prior_mean=mean.view(1, 3, 3)
    )
    for i in range(len(y)):
        moved = euler(
            net,
            pixels[i],
            y[i],
            delta[i],
            steps=steps,
            mean=mean,
            covariance=PRIOR**2 * torch.eye(9, dtype=torch.float64),
        )
        torch.testing.assert_close(numbers[i], moved.norm(), rtol=1e-9, atol=0.0)


def test_with_a_full_prior_covariance() -> None:
    net, pixels, y, delta = problem(1)
    root = 0.1 * torch.randn(9, 9, generator=torch.Generator().manual_seed(0)).double()
    covariance = root @ root.T + 0.02 * torch.eye(9, dtype=torch.float64)
    mean = torch.full((9,), 0.5, dtype=torch.float64)
    numbers, _ = scored(net, pixels, y, delta, influence_steps=3, prior=covariance)
    moved = euler(
        net, pixels[0], y[0], delta[0], steps=3, mean=mean, covariance=covariance
    )
    torch.testing.assert_close(numbers[0], moved.norm(), rtol=1e-8, atol=0.0)


def test_one_step_is_the_linear_prediction() -> None:
    net, pixels, y, delta = problem(1)
    linear, _ = scored(net, pixels, y, delta)
    moved = euler(
        net,
        pixels[0],
        y[0],
        delta[0],
        steps=1,
        mean=torch.full((9,), 0.5, dtype=torch.float64),
        covariance=PRIOR**2 * torch.eye(9, dtype=torch.float64),
    )
    torch.testing.assert_close(linear[0], moved.norm(), rtol=1e-9, atol=0.0)


def test_a_constant_jacobian_makes_every_number_of_steps_equal() -> None:
    def linear_loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        # Its gradient in the weights is x itself, whatever the weights.
        logits: Tensor = module(x)
        return logits.sum(1)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(9, 1)).double()
    _, pixels, y, _ = problem(1)
    delta = NOISE * torch.ones(1, 10, dtype=torch.float64)
    found = [
        scored(net, pixels, y, delta, influence_steps=k, criterion=linear_loss)[0]
        for k in (1, 7)
    ]
    # J = I/std, so each pixel errs by (R²δ/std − s²(x − μ))/(s² + R²/std²).
    j = 1 / STD[0]
    error = PRIOR**2 * j * NOISE - NOISE**2 * (pixels[0] - 0.5)
    exact = (error / (NOISE**2 + PRIOR**2 * j**2)).norm()
    for numbers in found:
        torch.testing.assert_close(numbers[0], exact, rtol=1e-10, atol=0.0)


def test_the_estimate_of_what_steps_leave_out_follows_the_truth() -> None:
    net, pixels, y, delta = problem(1)
    x = (pixels - MEAN[0]) / STD[0]
    scale = torch.full((9,), 1 / STD[0], dtype=torch.float64)
    jacobian = GradientJacobian(
        GradientMap(net, dtype=torch.float64), x, y, input_scale=scale
    )

    def at(steps: int) -> tuple[float, float]:
        settings = Settings(noise_std=NOISE, prior_std=PRIOR, influence_steps=steps)
        path = follow(
            jacobian, 0, settings, delta=delta[0], offset=pixels.flatten() - 0.5
        )
        return path.error, path.discretisation

    exact = at(80)[0]
    coarse, fine = at(2), at(16)
    assert abs(fine[0] - exact) < abs(coarse[0] - exact)
    # The estimate bounds a vector, of which the distance shows a part.
    assert abs(coarse[0] - exact) < 2 * coarse[1]
    assert fine[1] < coarse[1] / 4


def test_too_few_steps_for_large_noise_are_not_called_ok() -> None:
    net, pixels, y, delta = problem()
    coarse, words = scored(net, pixels, y, 30 * delta, influence_steps=2)
    exact, _ = scored(net, pixels, y, 30 * delta, influence_steps=25)
    assert "estimated" in words
    off = (coarse / exact - 1).abs()
    # Twice the 10 % that "ok" promises: the estimate is one of first order.
    assert all(gap < 0.2 for gap, word in zip(off, words, strict=True) if word == "ok")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"influence_steps": 0}, "at least 1"),
        ({"influence_steps": 2.5}, "must be an integer"),
        ({"influence_steps": True}, "must be an integer"),
        ({"influence_steps": 4, "delta": None}, "give its delta"),
        ({"influence_steps": 4, "solver": "lanczos"}, "needs solver='exact'"),
    ],
)
def test_refuses(settings: dict[str, object], message: str) -> None:
    net, pixels, y, delta = problem(1)
    # A wrong type is a TypeError, as everywhere.
    with pytest.raises((TypeError, ValueError), match=message):
        scored(net, pixels, y, **{"delta": delta, **settings})  # type: ignore[arg-type]


def test_an_image_that_leaves_what_the_network_can_evaluate_fails_alone() -> None:
    class Fragile(nn.Module):
        """Gives NaN for images that are far from the first two."""

        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.net(x)
            far = (x.flatten(1).abs().amax(1, keepdim=True) > 1.5).to(x)
            return logits + torch.log(1 - far) * 0

    _, pixels, y, delta = problem()
    delta[0] *= 1e-3
    pixels[0] = 0.5
    delta[1] *= 200
    numbers, words = scored(Fragile(), pixels, y, delta, influence_steps=4)
    assert words[0] == "ok"
    assert math.isfinite(float(numbers[0]))
    assert words[1] == "failed"
    assert math.isnan(float(numbers[1]))


def test_an_error_on_the_way_fails_no_other_score() -> None:
    class Refusing(nn.Module):
        """Raises for images far from the data."""

        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            if float(x.abs().max()) > 1.5:
                raise RuntimeError("pixels out of range")
            logits: Tensor = self.net(x)
            return logits

    _, pixels, y, delta = problem(1)
    pixels[0] = 0.5
    found = score(
        Refusing(),
        (pixels - MEAN[0]) / STD[0],
        y,
        ["lavp_l2_max", "i2f", "i2f_bayes"],
        noise_std=NOISE,
        delta=200 * delta,
        influence_steps=4,
        dtype=torch.float64,
        solver="exact",
    )
    assert found.status["lavp_l2_max"][0].word == "ok"
    assert math.isfinite(float(found["i2f"][0]))
    assert found.status["i2f_bayes"][0].word == "failed"
    assert "pixels out of range" in found.status["i2f_bayes"][0].reason


def test_a_singular_jacobian_with_hardly_any_noise() -> None:
    net, pixels, y, delta = problem(1)
    few = ["3.bias"]  # four numbers for nine pixels
    size = 4
    found = []
    for std in (1e-5, 1e-12):
        known: dict[str, object] = {"noise_std": std, "parameters": few}
        small = std * delta[:, :size] / NOISE
        numbers, words = scored(net, pixels, y, small, influence_steps=4, **known)
        assert words[0] in ("ok", "estimated")
        found.append(numbers[0])
    # The prior moves the image across the directions that the gradient shows; with so
    # little noise there is no other motion, and the path is the same.
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=0.0)


def test_a_path_that_turns_is_not_called_ok() -> None:
    """Kinks turn the velocity to and fro, so that its ends alone show little."""
    for trial in range(3):
        torch.manual_seed(trial)
        net = nn.Sequential(
            nn.Flatten(), nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 3)
        ).double()
        pixels = torch.rand(1, 1, 3, 3, dtype=torch.float64)
        size = sum(p.numel() for p in net.parameters())
        delta = 10 * NOISE * torch.randn(1, size, dtype=torch.float64)
        y = torch.tensor([1])
        coarse, words = scored(net, pixels, y, delta, influence_steps=8)
        fine, _ = scored(net, pixels, y, delta, influence_steps=30)
        off = float((coarse / fine - 1).abs())
        assert words[0] != "ok" or off < 0.2, (trial, off)
