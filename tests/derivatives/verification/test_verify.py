from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES, Function, NewStyle, dense_jacobian, mlp, relative
from torch import Tensor, nn
from torch.nn import functional as F

from leakwatch import GradientJacobian
from leakwatch.derivatives import GradientMap, UnsupportedModuleError

BY_NAME = {case.name: case for case in CASES}
X, Y = BY_NAME["mlp"].data(2)


def notes(module: nn.Module, dtype: torch.dtype = torch.float64) -> tuple[str, ...]:
    at = GradientMap(module, dtype=dtype)
    at(X, Y)
    return at.notes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["attention", "transformer"])
def test_layer_normalisation_is_right_in_forward_mode(
    name: str, dtype: torch.dtype
) -> None:
    # Torch's own reverse-over-forward is wrong there, with no error.
    case = BY_NAME[name]
    x, y = case.data(2)
    at = GradientMap(case.module(), dtype=dtype)
    u = torch.ones(2, at.size, dtype=dtype).cumsum(1).sin()
    pulled = at.vjp(x, y, u)
    assert at.path == "vmap"
    assert at.forward_mode
    for i in range(2):
        _, jacobian = dense_jacobian(case.reference(), x[i], y[i])
        limit = 1e-5 if dtype == torch.float32 else 1e-10
        assert relative(pulled[i], jacobian.T @ u[i].double()) < limit


def test_a_small_error_of_a_rule_is_found_in_float32_too() -> None:
    class Almost(NewStyle):
        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            return 3.0003 * ctx.saved_tensors[0] ** 2 * tangent

    module = Function(lambda m, x: m.b(Almost.apply(torch.tanh(m.a(x)))))
    at = GradientMap(module)
    v = X.float().reshape(2, -1)
    expected = GradientMap(module, path="loop").jvp(X, Y, v)
    assert relative(at.jvp(X, Y, v), expected) < 1e-5


@pytest.mark.parametrize("zeros", ["head", "all"])
def test_what_holds_at_the_start_holds_later(zeros: str) -> None:
    # With a last layer of zeros the cheap way happens to be right, for now.
    case = BY_NAME["attention"]
    module = case.module()
    ready = copy.deepcopy(module.state_dict())
    for p in module.head.parameters() if zeros == "head" else module.parameters():
        nn.init.zeros_(p)
    x, y = case.data(2)
    at = GradientMap(module, dtype=torch.float64)
    at(x, y)
    assert at.path == "vmap"
    module.load_state_dict(ready)
    u = torch.ones(2, at.size).cumsum(1).sin()
    expected = GradientMap(module, dtype=torch.float64, path="loop").vjp(x, y, u)
    assert relative(at.vjp(x, y, u), expected) < 1e-10


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_functions_that_torch_jit_has_optimised() -> None:
    def activation(t: Tensor) -> Tensor:
        return t * torch.sigmoid(1.7 * t) + t.sin()

    scripted = torch.jit.script(activation)
    x, y = BY_NAME["mlp"].data(2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Function(lambda m, x: m.b(m.act(m.a(x)))).double()
    module.act = scripted
    for _ in range(4):  # the profiling executor rewrites it after a few calls
        module(x).sum().backward()
    module.zero_grad()
    at = GradientMap(module, dtype=torch.float64)
    g, v = at(x, y), x.reshape(2, -1)
    pushed, pulled = at.jvp(x, y, v), at.vjp(x, y, g)
    module.act = activation
    _, jacobian = dense_jacobian(module, x[0], y[0])
    assert relative(pushed[0], jacobian @ v[0]) < 1e-8
    assert relative(pulled[0], jacobian.T @ g[0]) < 1e-8


def test_batch_statistics_are_noted() -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(48, 3),
    )
    (note,) = notes(module)
    assert "depends on the others in its batch" in note
    assert "batch statistics in 1" in note


def test_one_sample_is_enough_to_notice() -> None:
    module = nn.Sequential(mlp())
    module.register_forward_pre_hook(lambda m, a: (a[0] - a[0].mean(0) + a[0].sin(),))
    at = GradientMap(module, dtype=torch.float64)
    at(X[:1], Y[:1])
    assert "depends on the others" in at.notes[0]


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float32])
def test_a_lower_precision_inside_is_noted(lower: torch.dtype) -> None:
    module = Function(lambda m, x: m.b(torch.tanh(m.a(x)).to(lower).to(x.dtype)))
    (note,) = notes(module)
    assert str(lower) in note
    assert "not torch.float64" in note


def test_a_lower_precision_inside_is_no_wrong_rule() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.a(x))
        single = h.float()
        outer = single[:, :, None] @ single[:, None]
        return m.b(h * (outer.softmax(-1) @ single[..., None])[..., 0].to(x.dtype))

    at = GradientMap(Function(forward), dtype=torch.float64)
    v = X.reshape(2, -1)
    pushed = at.jvp(X, Y, v)
    assert at.path == "vmap"
    (note,) = at.notes
    assert "converts to torch.float32" in note
    expected = GradientMap(at.module, dtype=torch.float64, path="loop").jvp(X, Y, v)
    assert relative(pushed, expected) < 1e-5


def test_autocast_inside_a_forward_is_noted() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = m.a(x)
        return m.b(torch.tanh(h.to(x.dtype)))

    (note,) = notes(Function(forward), torch.float32)
    assert note.startswith("a (Linear) converts to torch.bfloat16")


def test_hooks_on_parameters_are_noted() -> None:
    module = mlp()
    module[1].weight.register_hook(lambda g: 2 * g)
    (note,) = notes(module)
    assert note.startswith("hooks on 1.weight")

    def tracker(g: Tensor) -> None: ...

    tracker.__module__ = "wandb.sdk"
    tracked = mlp()
    tracked[1].weight.register_hook(tracker)
    assert notes(tracked) == ()


@pytest.mark.parametrize("bias", [0.0, None])
def test_kinks_at_the_sample_are_no_hidden_dependence(bias: float | None) -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 3)
    )
    if bias is not None:
        nn.init.constant_(module[0].bias, bias)
    at = GradientMap(module, dtype=torch.float64)
    x = torch.zeros_like(X)
    x[:, :, 2:4] = X[:, :, 2:4].abs()
    at(x, Y)
    assert at.notes == ()
    wide = nn.Sequential(
        nn.Flatten(), nn.Linear(36, 3000), nn.ReLU(), nn.Linear(3000, 3)
    )
    assert notes(wide, torch.float32) == ()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 255.0])
def test_hidden_dependence_at_any_scale_of_the_input(scale: float) -> None:
    def shown(m: Any, x: Tensor) -> Tensor:
        return m.b(torch.tanh(m.a(x / scale)))

    def hidden(m: Any, x: Tensor) -> Tensor:
        return shown(m, x.square() / x.detach())

    for f, count in ((shown, 0), (hidden, 1)):
        at = GradientMap(Function(f))
        at(X * scale, Y)
        assert len(at.notes) == count


def amplifying(doublings: int) -> nn.Module:
    """Each of the steps h ↦ 2h² − 1 doubles what is wrong with h, kept in [−1, 1]."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.a(x))
        for _ in range(doublings):
            h = 2 * h.square() - 1
        return m.b(h)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Function(forward)


def test_rounding_is_not_taken_for_what_it_is_not() -> None:
    # 2³² · 1e-16: the last half of the digits is rounding, and differs from path to
    # path; no step is small enough for a difference and large enough to be resolved.
    at = GradientMap(amplifying(32), dtype=torch.float64)
    at(X, Y)
    assert at.path == "vmap"
    unsettled, amplified = at.notes
    assert unsettled.startswith("no finite difference of its gradient settles")
    assert amplified.startswith("it amplifies rounding")


def test_what_is_wrong_is_found_beside_amplified_rounding() -> None:
    module = amplifying(10)
    assert notes(module) == ()
    module.register_forward_pre_hook(lambda m, a: (a[0] + 1e-4 * a[0].mean(0),))
    assert any("depends on the others" in note for note in notes(module))
    module = amplifying(10)
    module.register_forward_pre_hook(lambda m, a: (a[0].square() / a[0].detach(),))
    (note,) = notes(module)
    assert "its derivatives do not show" in note


def test_everything_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    case = BY_NAME["writes-buffers"]
    x, y = case.data(2)
    with caplog.at_level(logging.INFO, "leakwatch"):
        at = GradientMap(case.module())
        jacobian = GradientJacobian(at, x, y)
        jacobian.gram(0)
        jacobian.normal().matvec(torch.ones(2, 36))
    assert len(caplog.records) == 3
    assert len({record.getMessage() for record in caplog.records}) == 3


def test_no_verdict_on_samples_without_gradient() -> None:
    module = mlp()
    module.register_forward_hook(lambda m, a, out: out * (a[0].sum() > 0))
    at = GradientMap(module, lambda m, x, y: m(x).square().sum(1))
    assert not bool(at(-X.abs(), Y).any())
    assert at.path == "auto"
    at(X.abs(), Y)
    assert at.path == "vmap"


def test_a_confident_sample_is_examined_as_well() -> None:
    module = BY_NAME["attention"].module()
    x, y = BY_NAME["attention"].data(2)
    criterion = lambda m, x, y: 1e-30 * F.cross_entropy(m(x), y, reduction="none")  # noqa: E731
    at = GradientMap(module, criterion)
    w = torch.full((2,), 1e30)
    u = torch.ones(2, at.size)
    expected = GradientMap(module, path="loop").vjp(x, y, u)
    assert relative(at.vjp(x, y, u, w), expected) < 1e-5


@pytest.mark.filterwarnings("ignore:None of the inputs:UserWarning")
def test_checkpoint_that_re_enters_autograd_is_refused() -> None:
    from torch.utils.checkpoint import checkpoint

    module = Function(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=True).tanh()))
    with pytest.raises(UnsupportedModuleError, match=r"use_reentrant|\.grad\(\)"):
        GradientMap(module)(X, Y)


class Own(nn.Module):
    """Noise that no stream of torch's knows of."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.size = size
        self.noise = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.from_numpy(self.noise.standard_normal(tuple(x.shape))).to(x)
        out: Tensor = self.layer(x + self.size * noise)
        return out


@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_a_forward_that_draws_from_another_stream_is_refused(size: float) -> None:
    torch.manual_seed(0)
    gradients = GradientMap(Own(size), dtype=torch.float64)
    with pytest.raises(UnsupportedModuleError, match="random"):
        gradients(torch.randn(2, 6, dtype=torch.float64), torch.tensor([0, 1]))


class Looked(nn.Module):
    """Integer inputs are looked up, and samples of a batch are mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.layer = nn.Linear(6, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        t = self.table(x.detach().long()).mean(1) + self.layer(x)
        out: Tensor = self.head((t + 0.1 * t.mean(0, keepdim=True)).tanh())
        return out


def test_mixing_is_noticed_in_a_network_that_looks_integers_up() -> None:
    torch.manual_seed(0)
    gradients = GradientMap(Looked(), dtype=torch.float64)
    x = torch.randint(5, (3, 6), generator=torch.Generator().manual_seed(0)).double()
    gradients(x, torch.tensor([0, 1, 2]))
    assert any("depends on the others" in note for note in gradients.notes)
