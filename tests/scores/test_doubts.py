"""A zero is a claim: nothing reads as safe because derivatives don't show it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import leakwatch
from leakwatch import GradientJacobian, GradientMap, ScoreResult

X, Y = (
    torch.rand(3, 1, 6, 6, generator=torch.Generator().manual_seed(5)),
    torch.arange(3),
)
SCORES = ["lavp", "i2f", "bayes", "norms"]
#: Of the gradient itself, not of its derivative.
PLAIN = {"grad_norm", "loss"}


class Net(nn.Module):
    """Two layers, with something done to input and activations."""

    def __init__(
        self,
        before: Callable[[Tensor], Tensor] = lambda x: x,
        between: Callable[[Tensor], Tensor] = torch.tanh,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(36, 20), nn.Linear(20, 3)
        self.before, self.between = before, between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.between(self.a(self.before(x.flatten(1)))))
        return out


class StraightThrough(torch.autograd.Function):
    """Rounds; its backward says that it does not."""

    @staticmethod
    def forward(ctx: object, h: Tensor) -> Tensor:
        return (h * 4).round() / 4

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Spike(torch.autograd.Function):
    """A step, with the slope of a sigmoid."""

    @staticmethod
    def forward(ctx: object, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)  # type: ignore[attr-defined]
        return (h > 0).to(h)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        (h,) = ctx.saved_tensors  # type: ignore[attr-defined]
        s = (4 * h).sigmoid()
        return grad * 4 * s * (1 - s)


def words(result: ScoreResult) -> dict[str, set[str]]:
    return {name: {s.word for s in result.status[name]} for name in result}


def assert_not_said(result: ScoreResult, among: set[str]) -> None:
    """No score has a number, each says why, and none that there is nothing."""
    for name in result:
        if name in PLAIN:
            continue
        assert bool(result[name].isnan().all()), name
        for status in result.status[name]:
            assert status.word in among, (name, status)
            assert len(status.reason) > 40
            assert "nothing to invert" not in status.reason


def scores(net: nn.Module, x: Tensor = X, **options: object) -> ScoreResult:
    return leakwatch.score(net, x, Y[: len(x)], SCORES, noise_std=1e-4, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "solver", ["exact", pytest.param("lanczos", id="matrix-free"), "power"]
)
def test_a_rounded_input_is_no_zero(dtype: torch.dtype, solver: str) -> None:
    net = Net(before=lambda x: (x * 255).round() / 255)
    result = scores(net, dtype=dtype, solver=solver)
    assert_not_said(result, {"undefined", "not computed"})
    assert words(result)["grad_norm"] == {"ok"}
    assert "moving each input by a level" in result.status["lavp_l2_max"][0].reason


def test_a_coarsely_quantised_input_is_no_zero() -> None:
    # Three bits: a level of eight does not move every pixel over a threshold.
    result = scores(Net(before=lambda x: (x * 7).round() / 7))
    assert_not_said(result, {"undefined"})


@pytest.mark.parametrize(
    "between",
    [
        lambda h: h + ((h * 4).round() / 4 - h).detach(),
        StraightThrough.apply,
        Spike.apply,
    ],
    ids=["detach", "function", "spike"],
)
def test_straight_through_layers_have_no_number(
    between: Callable[[Tensor], Tensor],
) -> None:
    assert_not_said(scores(Net(between=between)), {"failed", "undefined"})


@pytest.mark.parametrize("exact", [True, False])
def test_the_check_runs_in_float32_where_float64_can_not(exact: bool) -> None:
    def hidden(h: Tensor) -> Tensor:
        h = h.square() / (h if exact else h.detach())
        return torch.tanh(h @ torch.eye(20))  # a constant in float32

    result = scores(Net(between=hidden))
    if exact:
        assert words(result)["lavp_l2_max"] == {"ok"}
    else:
        assert_not_said(result, {"failed"})


def test_where_the_check_was_not_done_values_say_so() -> None:
    def half(h: Tensor) -> Tensor:
        return torch.tanh(h).bfloat16().to(h)

    result = scores(Net(between=half))
    for name in ("lavp_l2_max", "leaked_bits"):
        for status in result.status[name]:
            assert status.word == "estimated"
            assert "too rough to find out" in status.reason


def test_a_gradient_that_is_put_elsewhere_is_no_zero() -> None:
    class Elsewhere(Net):
        def forward(self, x: Tensor) -> Tensor:
            weights = {k: v.detach().clone() for k, v in self.named_parameters()}
            h = torch.tanh(F.linear(x.flatten(1), weights["a.weight"]))
            return F.linear(h, weights["b.weight"]) + 0 * self.b.bias

    result = scores(Elsewhere())
    assert_not_said(result, {"undefined"})
    assert words(result)["grad_norm"] == {"undefined"}


# -- degenerate networks ---------------------------------------------------------------


def dead() -> Net:
    net = Net(between=torch.relu)
    nn.init.constant_(net.a.bias, -100.0)
    nn.init.zeros_(net.b.bias)
    return net


def in_both(net: nn.Module) -> tuple[ScoreResult, ScoreResult]:
    single, double = (
        scores(net, X[:1], dtype=dtype) for dtype in (torch.float32, torch.float64)
    )
    return single, double


def test_a_sample_without_a_loss_is_not_safe() -> None:
    def hinge(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (module(x)[:, 0] - 50).relu()

    result = scores(Net(), criterion=hinge)
    assert_not_said(result, {"undefined"})
    assert words(result)["grad_norm"] == {"undefined"}
    assert words(result)["loss"] == {"ok"}


@pytest.mark.parametrize("margin", [126.6, 190.0])
def test_underflow_is_no_zero(margin: float) -> None:
    net = Net()
    with torch.no_grad():
        net.b.bias.copy_(torch.tensor([margin, 0.0, 0.0]))
    single, double = (
        scores(net, X[:1], dtype=d) for d in (torch.float32, torch.float64)
    )
    assert words(double)["grad_norm"] == {"ok"}
    norm = float(double["grad_norm"])
    assert 0 < norm < 1e-50
    assert_not_said(single, {"unresolved"})
    assert words(single)["grad_norm"] == {"unresolved"}
    assert f"norm of {norm:.0e}" in single.status["grad_norm"][0].reason


def test_small_gradients_keep_their_digits_in_float32() -> None:
    net = Net()
    with torch.no_grad():
        net.b.bias.copy_(torch.tensor([80.0, 0.0, 0.0]))
    single, double = (
        scores(net, X[:1], dtype=d) for d in (torch.float32, torch.float64)
    )
    assert 1e-36 < float(double["grad_norm"]) < 1e-32
    for name in ("grad_norm", "lavp_l2_max"):
        assert words(single)[name] == {"ok"}
        torch.testing.assert_close(single[name], double[name], rtol=1e-3, atol=0)


def test_a_gate_that_only_another_image_opens_is_no_zero() -> None:
    class Gated(Net):
        def forward(self, x: Tensor) -> Tensor:
            which = self.a(x.flatten(1)).argmax(1)
            out: Tensor = self.b(nn.functional.one_hot(which, 20).to(x))
            return out

    torch.manual_seed(1)
    net = Gated()
    at = GradientMap(net, dtype=torch.float64)
    others = torch.zeros_like(X), torch.ones_like(X)
    apart = [(at(X, Y) != at(other, Y)).any(1) for other in others]
    assert bool((apart[0] | apart[1]).all())
    assert_not_said(scores(net), {"undefined"})


@pytest.mark.parametrize("kind", ["zero weights", "dead units", "saturated"])
def test_a_zero_that_coarse_steps_confirm_says_what_it_is(kind: str) -> None:
    net = dead() if kind == "dead units" else Net()
    if kind == "zero weights":
        for p in net.parameters():
            nn.init.zeros_(p)
    if kind == "saturated":
        nn.init.constant_(net.a.bias, 400.0)
    at = GradientMap(net, dtype=torch.float64)
    moved = at(X, Y) - at(X * 0.5, Y)
    assert at(X, Y).norm() > 0.1
    assert bool((moved == 0).all())  # it does not depend on the image, near or far
    result = scores(net)
    assert bool((result["leaked_bits"] == 0).all())
    for name in ("i2f", "i2f_psnr"):
        assert words(result)[name] == {"undefined"}
    # What no noise can hide is the average image: half the range, here 1.
    guessed = -10 * torch.log10(torch.tensor(1 / 12))
    torch.testing.assert_close(
        result["i2f_bayes_psnr"], guessed.double().expand(3), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("solver", ["exact", "lanczos"])
def test_fewer_parameters_than_pixels_are_not_safe(solver: str) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 3), nn.Tanh())
    result = leakwatch.score(
        net, X, Y, SCORES, noise_std=1e-4, parameters="*bias", solver=solver
    )
    for name in ("i2f", "i2f_psnr"):
        assert words(result)[name] == {"undefined"}
    # Zero because the gradient has three entries, which no arithmetic changes.
    assert bool((result["lavp_l2_min"] == 0).all())
    assert math.isfinite(float(result["i2f_bayes_psnr"][0]))


def test_one_class_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 classes"):
        leakwatch.score(nn.Sequential(nn.Flatten(), nn.Linear(36, 1)), X, 0 * Y, "lavp")


def rounded_half(x: Tensor) -> Tensor:
    """Pixels of the second half in levels of eight bits."""
    flat = x.flatten(1)
    return torch.cat([flat[:, :18], (flat[:, 18:] * 255).round() / 255], 1).view_as(x)


@pytest.mark.parametrize(
    ("net", "prepare"),
    [
        (Net(before=rounded_half), None),
        (Net(), rounded_half),
        (Net(before=lambda x: x.where(x > 0.5, (x * 255).byte() / 255)), None),
    ],
    ids=["forward", "prepare", "cast"],
)
def test_some_rounded_pixels_are_not_safe(
    net: nn.Module, prepare: Callable[[Tensor], Tensor] | None
) -> None:
    result = scores(net, X[:1], prepare=prepare, solver="exact")
    assert_not_said(result, {"failed"})
    assert "input elements are zero, but" in result.status["lavp_l2_max"][0].reason


def test_pixels_without_a_derivative_where_a_kink_explains_it() -> None:
    # The largest of four pixels, and units that are off: no derivative in many pixels,
    # which take over or switch on within a tenth of the range.
    def before(x: Tensor) -> Tensor:
        return F.max_pool2d(x.view(-1, 1, 6, 6), 2).flatten(1).repeat(1, 4)

    for net in (Net(before), Net(lambda x: (x - 0.5).relu())):
        result = scores(net, X[:1], solver="exact")
        assert words(result)["lavp_l2_max"] == {"ok"}


class Clipped(Net):
    """Features of large norm are scaled down by a factor without a derivative."""

    limit = 1e9

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x.flatten(1))
        norm = h.norm(dim=1, keepdim=True)
        h = torch.where(norm > self.limit, h / norm.detach() * self.limit, h)
        out: Tensor = self.b(torch.tanh(h))
        return out


@pytest.mark.parametrize("solver", ["exact", "lanczos", "power"])
def test_a_sample_that_goes_another_way_than_the_first(solver: str) -> None:
    net = Clipped()
    x = X.clone()
    x[2] *= 3
    norms = net.a(x.flatten(1)).norm(dim=1).detach()
    net.limit = float(norms[:2].max() + norms[2]) / 2
    result = leakwatch.score(net, x, Y, "lavp_l2_max", solver=solver)
    found = [status.word for status in result.status["lavp_l2_max"]]
    assert found[2] == "failed"
    assert "failed" not in found[:2]
    assert math.isnan(result["lavp_l2_max"][2])


def test_a_verdict_is_not_that_of_earlier_samples() -> None:
    net = Clipped()
    net.limit = float(net.a(X.flatten(1)).detach().norm(dim=1).max()) * 1.5
    assert words(scores(net))["lavp_l2_max"] == {"ok"}
    assert words(scores(net, 3 * X))["lavp_l2_max"] == {"failed"}


def test_a_network_that_changes_during_a_run() -> None:
    net = Clipped()
    at = GradientMap(net)
    found = []
    for net.limit in (1e9, 0.1):
        jacobian = GradientJacobian(at, X, Y)
        jacobian.products.push(torch.ones(3, 36))
        found.append({status.word for status in jacobian.doubts})
    assert found == [{"ok"}, {"failed"}]


def test_a_small_part_without_a_derivative_is_found() -> None:
    # A thousandth of J, and most of what is predicted at little noise.
    def before(x: Tensor) -> Tensor:
        return x.cumsum(1).detach() * 3e-4 + x[:, :1]

    assert_not_said(scores(Net(before), dtype=torch.float64), {"failed"})


@pytest.mark.parametrize("limit", [0.05, 1.0])
@pytest.mark.parametrize("solver", ["exact", "lanczos", "power"])
def test_a_gradient_that_does_not_follow_the_loss(solver: str, limit: float) -> None:
    def clamp(h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda g: g.clamp(-limit, limit))
        return torch.tanh(h)

    net = Net(between=clamp)
    result = leakwatch.score(
        net, X[:1], Y[:1], ["lavp_l2_max", "grad_norm"], solver=solver
    )
    assert_not_said(result, {"failed"})
    assert "not proportional" in result.status["lavp_l2_max"][0].reason
    loss = F.cross_entropy(net(X[:1]), Y[:1])
    parts = torch.autograd.grad(loss, list(net.parameters()))
    norm = torch.cat([part.flatten() for part in parts]).norm()
    assert float(result["grad_norm"][0]) == pytest.approx(float(norm), rel=1e-5)
