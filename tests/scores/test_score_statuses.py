"""What is said where there is no number, or none to rely on."""

from __future__ import annotations

import math

import pytest
import torch
from score_problems import CASES, lenet
from torch import Tensor, nn

import leakwatch
from leakwatch.derivatives import GradientMap
from leakwatch.scores import (
    ScoreInputs,
    ScoreResult,
    Scoring,
    Settings,
    available,
    resolve,
    score,
)
from leakwatch.scores.i2f import psnr
from leakwatch.scores.result import Value, judged
from leakwatch.scores.settings import UNIFORM_STD
from leakwatch.status import STATUS_WORDS

ALL = available()
SPECTRAL = [name for name in ALL if name not in ("grad_norm", "loss")]


@pytest.fixture
def few_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the status counts, power iteration need not take its 50 products."""
    monkeypatch.setattr("leakwatch.scores.measure.power_iteration.ITERATIONS", 3)


def words(result: ScoreResult, sample: int) -> dict[str, str]:
    return {name: result.status[name][sample].word for name in result}


def assert_honest(result: ScoreResult) -> None:
    """Usable values are finite, none at all is infinite, and the rest have reasons."""
    for name, numbers in result.items():
        assert not torch.isinf(numbers).any(), name
        assert torch.isfinite(numbers[result.usable(name)]).all(), name
        for status in result.status[name]:
            assert status.word in STATUS_WORDS
            assert (status.reason == "") == (status.word == "ok"), (name, status)


class Rooted(nn.Module):
    """A network whose output is NaN for dark images."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * (x.mean(1, keepdim=True) - 0.2).sqrt()


class Refusing(nn.Module):
    """A network that raises an exception for dark images."""

    def __init__(self) -> None:
        super().__init__()
        self.rooted = Rooted()

    def forward(self, x: Tensor) -> Tensor:
        if bool((x.mean() < 0.2).any()):
            raise RuntimeError("too dark")
        return self.rooted(x)


@pytest.mark.usefixtures("few_products")
@pytest.mark.parametrize(
    ("net", "solver", "with_delta"),
    [
        (Rooted, "exact", False),
        (Rooted, "exact", True),
        (Rooted, "lanczos", True),
        (Rooted, "power", False),
        (Refusing, "exact", True),
        (Refusing, "lanczos", False),
    ],
)
def test_a_bad_sample_says_failed_and_hurts_no_other(
    net: type[nn.Module], solver: str, with_delta: bool
) -> None:
    x = 0.5 + torch.rand(5, 6, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([0, 1, 2, 0, 1])
    module = net()
    gradients = GradientMap(module, dtype=torch.float64)
    delta = torch.full((5, gradients.size), 1e-3) if with_delta else None
    offset = torch.zeros(5, 6)

    def run(x: Tensor) -> ScoreResult:
        settings = Settings(noise_std=1e-2)
        scoring = Scoring(resolve(ALL), solver=solver)
        inputs = ScoreInputs(gradients, x, y, delta=delta, offset=offset.double())
        return scoring.evaluate(inputs, settings)

    good = run(x)
    x[3] = 0.0
    bad = run(x)
    assert set(words(bad, 3).values()) == {"failed"}
    assert all(math.isnan(bad[name][3]) for name in bad)
    assert_honest(bad)
    others = [0, 1, 2, 4]
    for name in ALL:
        torch.testing.assert_close(
            bad[name][others], good[name][others], rtol=1e-9, atol=0, equal_nan=True
        )
    if solver == "exact":
        assert bad.eigenvalues is not None
        assert bad.eigenvalues[3].isnan().all()
        assert bad.eigenvalues[others].isfinite().all()


def test_what_stops_every_sample_is_raised() -> None:
    with pytest.raises(RuntimeError, match="too dark"):
        Scoring(resolve("norms")).evaluate(
            ScoreInputs(
                GradientMap(Refusing()), torch.zeros(3, 6), torch.tensor([0, 1, 2])
            ),
            Settings(),
        )


@pytest.mark.usefixtures("few_products")
def test_a_jacobian_out_of_range() -> None:
    """The gradient is finite, its derivative at zero is not."""

    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear((x - 0.5).abs().sqrt())

    x = torch.rand(3, 4)
    x[1] = 0.5
    y = torch.tensor([0, 1, 2])
    for solver in ("exact", "lanczos", "power"):
        result = score(
            Steep(), x, y, ALL, noise_std=1e-2, solver=solver, dtype=torch.float64
        )
        found = words(result, 1)
        assert found["grad_norm"] == found["loss"] == "ok"
        assert {found[name] for name in SPECTRAL} == {"failed"}
        assert_honest(result)


def squared(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Half the squared error of the first output."""
    return 0.5 * (module(x)[:, 0] - y).square()


def test_a_gradient_that_vanishes_has_no_direction() -> None:
    """A perfect fit: g = 0, but J is not."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.rand(2, 3).double()
    y = net(x)[:, 0].detach()
    y[1] += 1.0
    for solver in ("exact", "lanczos"):
        result = score(
            net,
            x,
            y,
            ALL,
            noise_std=1e-2,
            criterion=squared,
            dtype=torch.float64,
            solver=solver,
        )
        assert float(result["grad_norm"][0]) == 0.0
        assert result.status["grad_norm"][0].word == "ok"
        for name in ("lavp_cos_max", "lavp_cos_min", "lavp_fusion"):
            assert result.status[name][0].word == "undefined"
            assert math.isnan(result[name][0])
        assert result.status["lavp_l2_max"][0].word == "ok"
        assert float(result["lavp_l2_max"][0]) > 0
        assert result.status["lavp_cos_max"][1].word == "ok"
        assert_honest(result)


@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_a_gradient_that_does_not_depend_on_the_image(epsilon: float) -> None:
    """Dead units: nothing leaks, and no I²F says that the error is 0."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
    nn.init.constant_(net[0].bias, -100.0)
    x, y = torch.rand(1, 3), torch.tensor([1])
    result = score(net, x, y, ALL, noise_std=1e-2, epsilon=epsilon, dtype=torch.float64)
    for name in ("i2f", "i2f_psnr", "i2f_lb"):
        assert result.status[name][0].word == "undefined", name
        assert math.isnan(result[name][0])
    zeros = ("jacobian_norm", "lavp_l2_max", "leaked_bits", "fisher_information_loss")
    for name in (*zeros, "noise_std_for_psnr"):
        assert (float(result[name][0]), words(result, 0)[name]) == (0.0, "ok"), name
    prior = torch.tensor([UNIFORM_STD * 3**0.5], dtype=torch.float64)
    torch.testing.assert_close(result["i2f_bayes"], prior)
    assert_honest(result)


@pytest.mark.usefixtures("few_products")
@pytest.mark.parametrize("solver", ["exact", "lanczos", "power"])
def test_fewer_gradient_entries_than_pixels(solver: str) -> None:
    """λ_min is 0 by dimension, and an undamped I²F infinite, which is no number."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(30, 1), nn.Tanh(), nn.Linear(1, 2))
    for p in net[1].parameters():
        p.requires_grad_(False)
    x, y = torch.rand(2, 30), torch.tensor([0, 1])
    result = score(net, x, y, ALL, noise_std=1e-2, solver=solver)
    for name in ("lavp_l2_min", "lavp_cos_min"):
        torch.testing.assert_close(result[name], torch.zeros(2).double())
        assert words(result, 0)[name] == "ok"
    assert_honest(result)
    if solver == "power":
        assert words(result, 0)["i2f"] == "not computed"
        return
    for name in ("i2f", "i2f_psnr"):
        assert words(result, 0)[name] == "undefined"
        assert "4 entries can't determine 30 pixels" in result.status[name][0].reason
    # At least 26 pixels' worth of prior variance is left whatever the noise.
    assert float(result["i2f_bayes"][0]) > 0.99 * UNIFORM_STD * 26**0.5
    if solver == "lanczos":
        assert words(result, 0)["noise_std_for_psnr"] == "ok"
        assert float(result["noise_std_for_psnr"][0]) == 0.0
        return
    assert words(result, 0)["i2f_bayes"] == words(result, 0)["leaked_bits"] == "ok"
    assert (float(result["noise_std_for_psnr"][0]), words(result, 0)["i2f_lb"]) == (
        0.0,
        "ok",
    )
    damped = score(net, x, y, "i2f", noise_std=1e-2, epsilon=1e-3)
    assert words(damped, 0)["i2f"] == "ok"


def test_one_gradient_entry() -> None:
    """Every curvature of the cosine distance is 0: there is one direction only."""
    net = nn.Linear(4, 1, bias=False)
    net.weight.requires_grad_(False)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.factor = net, nn.Parameter(torch.tensor(0.7))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) * self.factor

    result = score(Scaled(), torch.rand(1, 4), torch.ones(1), "lavp", criterion=squared)
    assert float(result["lavp_cos_max"]) == float(result["lavp_cos_min"]) == 0.0
    assert float(result["lavp_fusion"]) == 0.0
    assert float(result["lavp_l2_max"]) > 0


class Blurred(nn.Module):
    """An MLP that sees its input through a matrix of given singular values."""

    def __init__(self, singular: Tensor) -> None:
        super().__init__()
        torch.manual_seed(5)
        n = len(singular)
        left, _ = torch.linalg.qr(torch.randn(n, n).double())
        right, _ = torch.linalg.qr(torch.randn(n, n).double())
        self.register_buffer("blur", left @ torch.diag(singular) @ right)
        self.net = nn.Sequential(nn.Linear(n, 12), nn.Tanh(), nn.Linear(12, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x @ self.blur.to(x.dtype))


def blurred(smallest: float, dtype: torch.dtype, **options: object) -> ScoreResult:
    singular = torch.ones(16).double()
    singular[-1] = smallest
    x = torch.rand(2, 16, generator=torch.Generator().manual_seed(3)).double()
    settings = {"noise_std": 1e-3, "dtype": dtype, **options}
    return score(Blurred(singular), x, torch.tensor([1, 4]), ALL, **settings)


def test_below_the_precision_of_float32_but_not_of_float64() -> None:
    coarse, fine = (blurred(8e-7, t) for t in (torch.float32, torch.float64))
    for name in ("lavp_l2_min", "lavp_cos_min", "lavp_fusion", "i2f", "i2f_psnr"):
        assert words(coarse, 0)[name] == "unresolved", name
        assert "float64" in coarse.status[name][0].reason
        assert math.isnan(coarse[name][0])
    for name in ("lavp_l2_max", "i2f_bayes", "jacobian_norm", "leaked_bits"):
        assert words(coarse, 0)[name] == "ok"
        torch.testing.assert_close(coarse[name], fine[name], rtol=1e-4, atol=0)
    assert set(words(fine, 0).values()) == {"ok"}
    assert_honest(coarse)


def test_just_above_the_floor_the_error_is_stated() -> None:
    """Between unresolved and ok a number comes with the bound of its error."""
    coarse, fine = (blurred(1e-5, t) for t in (torch.float32, torch.float64))
    status = coarse.status["lavp_l2_min"][0]
    assert status.word == "estimated"
    assert "rounding may have changed it by up to" in status.reason
    percent = float(status.reason.split("up to ")[1].split(" %")[0])
    actual = abs(coarse["lavp_l2_min"][0] / fine["lavp_l2_min"][0] - 1)
    assert 100 * float(actual) <= percent
    assert words(coarse, 0)["i2f"] in ("ok", "estimated")


@pytest.mark.parametrize(("low", "high"), [(1.6, 3.0), (2.7, 4.8)])
def test_what_rounding_changed_of_decibels_is_said_in_decibels(
    low: float, high: float
) -> None:
    found = psnr(judged(2.8, low, high, "x"), 784, 1.0)
    ends = [psnr(Value(end), 784, 1.0).number for end in (low, high)]
    most = max(abs(end - found.number) for end in ends)
    assert found.status.word == "estimated"
    assert f"by up to {most:.1f} dB;" in found.status.reason
    whole = psnr(judged(2.8, 0.0, 3.0, "x"), 784, 1.0)
    assert "by up to the whole of the error" in whole.status.reason


def test_rank_deficient_in_any_precision() -> None:
    """An exact zero can't be told from rounding: never a value, never infinite."""
    for dtype in (torch.float32, torch.float64):
        result = blurred(0.0, dtype)
        for name in ("lavp_l2_min", "lavp_cos_min", "lavp_fusion", "i2f", "i2f_psnr"):
            assert words(result, 0)[name] == "unresolved", name
        assert words(result, 0)["i2f_bayes"] == "ok"
        assert_honest(result)
    damped = blurred(0.0, torch.float32, epsilon=1e-3)
    assert words(damped, 0)["i2f"] == "ok"
    # ε far below what is resolved: the largest term, at λ = ε, may hide below it.
    hopeless = blurred(0.0, torch.float32, epsilon=1e-18)
    assert words(hopeless, 0)["i2f"] == "unresolved"


def test_given_perturbation_and_unresolved_directions() -> None:
    shape = (2, GradientMap(Blurred(torch.ones(16).double())).size)
    delta = 1e-3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.float64):
        result = blurred(0.0, dtype, delta=delta)
        assert words(result, 0)["i2f"] == "unresolved"
        assert words(result, 0)["i2f_nom"] == words(result, 0)["i2f_lb"] == "ok"
        assert words(result, 0)["i2f_bayes"] == "ok"
        assert_honest(result)
    nothing = blurred(1.0, torch.float64, delta=torch.zeros(shape))
    assert float(nothing["i2f"][0]) == 0.0
    assert words(nothing, 0)["i2f_psnr"] == "undefined"
    assert_honest(nothing)


def test_scores_that_a_given_perturbation_does_not_replace() -> None:
    case = CASES[1]
    net, (x, y) = case.make(), case.data(1)
    delta = torch.full((1, GradientMap(net).size), 1e-3)
    result = score(net, x, y, ALL, delta=delta)
    for name in ("i2f_bayes", "leaked_bits", "fisher_information_loss"):
        status = result.status[name][0]
        assert status.word == "not computed"
        assert "noise_std" in status.reason
    assert words(result, 0)["i2f"] == words(result, 0)["noise_std_for_psnr"] == "ok"


def test_target_below_what_the_prior_gives() -> None:
    case = CASES[1]
    net, (x, y) = case.make(), case.data(1)
    result = score(net, x, y, "noise_std_for_psnr", target_psnr=5.0)
    status = result.status["noise_std_for_psnr"][0]
    assert status.word == "undefined"
    assert "below 10.8 dB" in status.reason  # 10 log10 12


def test_power_sees_the_ends_only(
    small: tuple[nn.Module, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leakwatch.scores.measure.power_iteration.ITERATIONS", 15)
    net, x, y = small
    small = net, x[:2], y[:2]
    exact = score(*small, ALL, noise_std=1e-2, dtype=torch.float64)
    assert exact.solver == "exact"
    result = score(*small, ALL, noise_std=1e-2, dtype=torch.float64, solver="power")
    assert result.solver == "power"
    assert result.eigenvalues is None
    assert_honest(result)
    for name in ("i2f", "i2f_psnr", "i2f_bayes", "leaked_bits", "noise_std_for_psnr"):
        status = result.status[name][0]
        assert status.word == "not computed"
        assert "power" in status.reason
    for name in ("jacobian_norm", "i2f_nom"):
        status = result.status[name][0]
        assert status.word == "estimated"
        error = float(status.reason.split("standard error ")[1].split(" %")[0]) / 100
        torch.testing.assert_close(result[name], exact[name], rtol=4 * error, atol=0)
    assert words(result, 0)["i2f_lb"] == words(result, 0)["lavp_l2_max"]
    torch.testing.assert_close(
        result["lavp_l2_max"], exact["lavp_l2_max"], rtol=0.3, atol=0
    )
    smallest = result.status["lavp_l2_min"][0]
    assert smallest.word == "not converged"
    assert "upper bound" in smallest.reason
    assert bool((result["lavp_l2_min"] >= exact["lavp_l2_min"]).all())
    assert not bool(result.usable("lavp_fusion").any())


def test_lanczos_in_float32_converges() -> None:
    net, (x, y) = lenet(), CASES[0].data(3)
    names = ["lavp_l2_max", "lavp_cos_max"]
    coarse = score(net, x, y, names, solver="lanczos")
    fine = score(net, x, y, names, solver="exact", dtype=torch.float64)
    for name in names:
        assert words(coarse, 0)[name] == "ok"
        torch.testing.assert_close(coarse[name], fine[name], rtol=1e-4, atol=0)


def test_a_confident_sample_in_float32() -> None:
    """A loss of 1e-20, where H leaves the range of float32."""
    net = CASES[1].make()
    with torch.no_grad():
        net[3].bias[2] += 47.0
    x, y = CASES[1].data(1)[0], torch.tensor([2])
    names = [n for n in ALL if n not in ("i2f_bayes", "i2f_bayes_psnr")]
    coarse = score(net, x, y, names, noise_std=1e-22)
    fine = score(net, x, y, names, noise_std=1e-22, dtype=torch.float64)
    assert 0 < float(fine["lavp_l2_max"]) < 1e-38
    for name in names:
        if name == "noise_std_for_psnr":
            assert float(fine[name]) > 0
        assert words(coarse, 0)[name] == "ok", coarse.status[name]
        torch.testing.assert_close(coarse[name], fine[name], rtol=1e-3, atol=0)
    products = score(net, x, y, "norms", solver="lanczos")
    assert words(products, 0)["jacobian_norm"] == "estimated"
    torch.testing.assert_close(
        products["jacobian_norm"], fine["jacobian_norm"], rtol=0.3, atol=0
    )


def test_float64_is_not_advised_in_float64() -> None:
    torch.manual_seed(0)
    # Two of four inputs change nothing, so that λ_min is zero to rounding.
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 5), torch.nn.Sigmoid(), torch.nn.Linear(5, 2)
    )
    with torch.no_grad():
        net[0].weight[:, 2:] = net[0].weight[:, :2]  # type: ignore[index]
    x, y = torch.rand(1, 4), torch.tensor([0])
    reasons = {}
    for dtype in (torch.float32, torch.float64):
        found = leakwatch.score(
            net, x, y, ["lavp", "i2f"], noise_std=1e-3, dtype=dtype, parameters="2.*"
        )
        reasons[dtype] = " ".join(s[0].reason for s in found.status.values())
    assert "compute in float64 (argument dtype)" in reasons[torch.float32]
    assert "compute with" not in reasons[torch.float64]
    assert "it is float64 already" in reasons[torch.float64]
