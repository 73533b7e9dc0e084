"""Small networks that differentiate in every way that has broken such code before.

A new kind of network joins all tests of the gradient map with one entry in `CASES`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

CLASSES = 3
IMAGE = (1, 6, 6)


@dataclass(frozen=True)
class Case:
    """A network, the shape of one input, and the path that it is expected to take."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = IMAGE
    path: str = "vmap"
    twin: Callable[[], nn.Module] | None = None  # an eager equal, for compiled ones
    notes: tuple[str, ...] = ()  # a word of each expected note
    culprit: str = ""  # the submodule that the log line names

    def module(self) -> nn.Module:
        return _seeded(self.build)

    def reference(self) -> nn.Module:
        """The same network, for oracles that use it without leakwatch."""
        return _seeded(self.twin or self.build).double().eval()

    def data(
        self, batch: int = 2, dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(batch, *self.shape, generator=generator, dtype=torch.float64)
        return x.to(dtype), torch.arange(batch) % CLASSES


class Elsewhere(Tensor):
    """A tensor that behaves as if it lay on another device than all others.

    It meets no other tensor before ``.to(device)`` has made a plain one of it.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        places = (*args[1:], kwargs.get("device"))
        moved = any(isinstance(place, str | torch.device | Tensor) for place in places)
        if func is Tensor.to and moved:
            there = super().__torch_function__(func, types, args, kwargs)
            return there.as_subclass(Tensor)
        met = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if any(not isinstance(t, cls) and t.ndim for t in met):
            raise RuntimeError(f"{func.__name__} got tensors of two devices")
        return super().__torch_function__(func, types, args, kwargs)


def elsewhere(*tensors: Tensor) -> list[Tensor]:
    """These as if they lay on another device than the network, on any machine."""
    return [t.as_subclass(Elsewhere) for t in tensors]


def dense_jacobian(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> tuple[Tensor, Tensor]:
    """g and J of one sample by double backward through the module's own parameters."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    leaf = x.clone().requires_grad_()
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            value = loss(module(leaf[None].clone()), y[None])
            parts = torch.autograd.grad(
                value, parameters, create_graph=True, materialize_grads=True
            )
            g = torch.cat([part.reshape(-1) for part in parts])
            u = torch.zeros_like(g, requires_grad=True)
            nothing = g.new_zeros(g.numel(), x.numel())
            if not g.requires_grad:
                return g.detach(), nothing
            back = torch.autograd.grad(
                g, leaf, u, create_graph=True, materialize_grads=True
            )[0].reshape(-1)
            if not back.requires_grad:
                return g.detach(), nothing
            columns = [
                torch.autograd.grad(b, u, retain_graph=True, materialize_grads=True)[0]
                for b in back
            ]
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return g.detach(), torch.stack(columns, 1)


def relative(value: Tensor, expected: Tensor) -> float:
    """‖value − expected‖/‖expected‖; for a zero ``expected`` the absolute error."""
    size = float(expected.double().norm()) or 1.0
    return float((value.double() - expected.double()).norm()) / size


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # old-style weight_norm
        torch.manual_seed(0)
        return build()


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2, padding=1),
        nn.Sigmoid(),
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(36, CLASSES),
    )


def mlp(activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(36, 7),
        activation(),
        nn.Linear(7, 5),
        activation(),
        nn.Linear(5, CLASSES, bias=False),
    )


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 3, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(3)
        self.conv = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, CLASSES)
        for bn in (self.bn1, self.bn2):
            nn.init.normal_(bn.running_mean, std=0.1)
            nn.init.uniform_(bn.running_var, 0.5, 1.5)
        self.bn2.eval()  # as people do who freeze its statistics

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.stem(x)), inplace=True)
        x = F.relu(x + self.bn2(self.conv(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(9, 8)
        self.position = nn.Parameter(torch.randn(4, 8) / 10)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = F.unfold(x, 3, stride=3).transpose(1, 2)
        tokens = self.embed(tokens) + self.position
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return self.head(self.norm(tokens + mixed).mean(1))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x[:, 0]).mean(1))


def group_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def no_linear() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, CLASSES, 3), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


class Function(nn.Module):
    """Two linear layers `a`, `b` and a forward written as a function of both."""

    def __init__(
        self,
        f: Callable[[Any, Tensor], Tensor],
        prepare: Callable[[Any], object] = lambda module: None,
    ) -> None:
        super().__init__()
        self.a = nn.Linear(36, 6)
        self.b = nn.Linear(6, CLASSES)
        self.f = f
        prepare(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, x.flatten(1))


def function(
    f: Callable[[Any, Tensor], Tensor],
    prepare: Callable[[Any], object] = lambda module: None,
) -> Callable[[], nn.Module]:
    return lambda: Function(f, prepare)


def _plain(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x)))


def _write_into_input(m: Any, x: Tensor) -> Tensor:
    x.mul_(0.5).clamp_(-1, 1)
    return _plain(m, x)


def _write_after_linear(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.mul_(2).add_(1)
    out = m.b(torch.tanh(h))
    out.mul_(3)
    return out


def _item(m: Any, x: Tensor) -> Tensor:
    return _plain(m, x if x.mean().item() > 0 else x.sin())


def _fresh_zeros(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), 6, dtype=x.dtype)
    out[:, :3] = torch.tanh(m.a(x))[:, 3:]
    out[:, 3:] = x[:, :3] ** 2
    return m.b(out)


def _counted(m: Any, x: Tensor) -> Tensor:
    m.steps += 1
    m.mean.lerp_(x.detach().mean(0), 0.5)
    return _plain(m, x * m.steps) + m.b(torch.tanh(m.a(m.mean + x)))


def _register_counters(m: Any) -> None:
    m.register_buffer("steps", torch.zeros((), dtype=torch.long))
    m.register_buffer("mean", torch.ones(36))


def _nested(m: Any, x: Tensor) -> Tensor:
    def energy(q: Tensor) -> Tensor:
        return torch.tanh(m.a(q)).square().sum()

    slope = torch.func.vmap(torch.func.grad(energy))(x)
    return m.b(torch.sigmoid(m.a(x + slope)))


def _renormalised(m: Any, x: Tensor) -> Tensor:
    m.a.weight.data = torch.renorm(m.a.weight.data, 2, 0, 0.3)
    return _plain(m, x)


def _renormalised_in_place(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.a.weight.clamp_(-0.1, 0.1)
    return _plain(m, x)


def _no_grad_norm(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        size = x.norm(dim=1, keepdim=True)
    return _plain(m, x / size)


def _round_trip(m: Any, x: Tensor) -> Tensor:
    return _plain(m, x + (x.round() - x).detach())


class OldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, out: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * out


class NewStyle(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, out: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * out


class WithJvp(NewStyle):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * tangent


class WrongJvp(NewStyle):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x**2 * tangent


class Constant(torch.autograd.Function):
    """Its backward hides that it depends on the input, as many extensions' does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.slope = 3 * x.detach() ** 2
        return x**3

    @staticmethod
    def backward(ctx: Any, out: Tensor) -> Tensor:
        return ctx.slope * out


def custom(rule: type[torch.autograd.Function]) -> Callable[[], nn.Module]:
    return function(lambda m, x: m.b(rule.apply(torch.tanh(m.a(x)))))


class Warp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Linear(36, 6)
        self.head = nn.Linear(36, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        theta = self.locate(x.flatten(1)).view(-1, 2, 3) / 3
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        warped = F.grid_sample(x, grid, align_corners=False)
        return self.head(warped.flatten(1))


def _warps_twice() -> bool:
    """Old versions of torch have no second derivative of ``grid_sample``."""
    x = torch.rand(1, 1, 2, 2, requires_grad=True)
    at = torch.zeros(1, 2, 2, 2, requires_grad=True)
    out = F.grid_sample(x, at, align_corners=False).square().sum()
    (back,) = torch.autograd.grad(out, at, create_graph=True)
    try:
        torch.autograd.grad(back.sum(), at)
    except RuntimeError:
        return False
    return True


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x[:, None].sin())


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.core = kind(6, 4, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(x[:, 0, :3])[0][:, -1])


class Subclass(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.softmax(1), self.bias)


def _subclassed(m: Any) -> None:
    m.a = Subclass(36, 6)


def _tie(m: Any) -> None:
    m.a = nn.Linear(36, 36)
    m.c = nn.Linear(36, 36)
    m.c.weight = m.a.weight
    m.b = nn.Linear(36, CLASSES)


def _share(m: Any) -> None:
    m.square = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    m.alias = m.square


def _normalise(
    wrap: Callable[..., nn.Module],
) -> Callable[[Any], None]:
    def prepare(m: Any) -> None:
        m.a = wrap(m.a)

    return prepare


def _prune(m: Any) -> None:
    nn.utils.prune.l1_unstructured(m.a, "weight", 0.5)


def _freeze(m: Any) -> None:
    m.a.requires_grad_(False)
    m.b.bias.requires_grad_(False)


def _hook_outputs(m: Any) -> None:
    m.a.register_forward_hook(lambda module, args, out: out.sin() * args[0].mean())
    m.b.register_forward_pre_hook(lambda module, args: (args[0].exp(),))


def _buffers(m: Any) -> None:
    m.register_buffer("shift", torch.randn(36, dtype=torch.float64))
    m.register_buffer("turn", torch.polar(torch.ones(19), torch.rand(19)))
    m.register_buffer("order", torch.randperm(36))
    m.register_buffer("keep", torch.rand(36) > 0.3)


def _with_buffers(m: Any, x: Tensor) -> Tensor:
    x = torch.fft.irfft(torch.fft.rfft(x) * m.turn, n=36)
    return _plain(m, (x + m.shift)[:, m.order] * m.keep)


def _accumulate(m: Any, x: Tensor) -> Tensor:
    m.total += x.detach().mean()
    m.seen.append(x)
    m.last = m.total * 2
    return _plain(m, x * m.last.to(x.dtype))


def _accumulator(m: Any) -> None:
    m.total, m.seen = torch.ones((), dtype=torch.float64), []


def _remember(m: Any, x: Tensor) -> Tensor:
    if m.cache is None:
        m.cache = x.mean()
    m.calls += 1
    return _plain(m, x * m.cache * m.calls)


def _memory(m: Any) -> None:
    m.cache, m.calls = None, 0


def _tokens(m: Any, x: Tensor) -> Tensor:
    t = torch.tanh(m.a(torch.stack([x, x.cos()], 1)))
    return m.b(t).mean(1)


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.save_hyperparameters()

    def forward(self, x: Tensor) -> Tensor:
        logits = self.net(x)
        self.accuracy(logits.detach(), logits.detach().argmax(1))
        return logits


def compiled_root() -> nn.Module:
    module: nn.Module = torch.compile(mlp(), backend="eager")
    return module


def compiled_inside() -> nn.Module:
    module = lenet()
    module[0] = torch.compile(module[0], backend="eager")
    module[5] = torch.compile(module[5], backend="eager")
    return module


def compiled_in_place() -> nn.Module:
    module = mlp()
    module.compile(backend="eager")
    module[1].compile(backend="eager")
    return module


@torch.compile(backend="eager")
def _compiled_function(x: Tensor) -> Tensor:
    return x.sin() * x


CASES = [
    Case("lenet", lenet),
    Case("mlp", mlp),
    Case("mlp-relu", lambda: mlp(nn.ReLU)),
    Case("mlp-relu-in-place", lambda: mlp(lambda: nn.ReLU(inplace=True))),
    Case("batchnorm", Residual),
    Case("attention", Attention),
    Case("transformer", Transformer),
    Case("groupnorm", group_norm),
    Case("no-linear", no_linear),
    Case("one-dimensional", lambda: nn.Linear(5, CLASSES), shape=(5,)),
    Case(
        "scalar-inputs",
        Scalar,
        shape=(),
    ),
    Case(
        "shared-submodule",
        function(
            lambda m, x: m.b(m.alias(m.square(torch.tanh(m.a(x))))),
            _share,
        ),
    ),
    Case(
        "tied",
        function(lambda m, x: m.b(torch.tanh(m.c(torch.tanh(m.a(x))))), _tie),
    ),
    Case(
        "linear-twice",
        function(
            lambda m, x: m.b(m.s(torch.tanh(m.s(torch.tanh(m.a(x)))))),
            lambda m: setattr(m, "s", nn.Linear(6, 6)),
        ),
    ),
    Case(
        "read-outside",
        function(lambda m, x: _plain(m, x) + m.a.weight.sin().mean() * x[:, :3]),
    ),
    Case(
        "parameter-as-buffer",
        function(
            lambda m, x: _plain(m, x) * m.same.mean().exp(),
            lambda m: m.register_buffer("same", m.a.weight),
        ),
    ),
    Case(
        "scalar-parameter",
        function(
            lambda m, x: m.scale.exp() * _plain(m, x),
            lambda m: setattr(m, "scale", nn.Parameter(torch.tensor(0.3))),
        ),
    ),
    Case(
        "complex-weights",  # an odd number of entries in all
        function(
            lambda m, x: _plain(m, (torch.view_as_complex(m.pairs) * x).abs()),
            lambda m: setattr(m, "pairs", nn.Parameter(torch.randn(36, 2))),
        ),
    ),
    Case("unused", function(lambda m, x: m.b(x[:, :6].sin()))),
    Case(
        "independent-of-input",
        function(lambda m, x: m.b.bias + 0 * x[:, :3]),
    ),
    Case("frozen", function(_plain, _freeze)),
    Case("dropout", function(lambda m, x: _plain(m, F.dropout(x, 0.5, m.training)))),
    Case("writes-into-input", function(_write_into_input)),
    Case("writes-after-linear", function(_write_after_linear)),
    Case(
        "spectral-norm",
        function(_plain, _normalise(nn.utils.parametrizations.spectral_norm)),
    ),
    Case(
        "weight-norm",
        function(_plain, _normalise(nn.utils.parametrizations.weight_norm)),
    ),
    Case("old-spectral-norm", function(_plain, _normalise(nn.utils.spectral_norm))),
    Case("old-weight-norm", function(_plain, _normalise(nn.utils.weight_norm))),
    Case("pruned", function(_plain, _prune)),
    Case("hooks", function(_plain, _hook_outputs), notes=("batch",)),
    Case("tokens", function(_tokens)),
    Case("subclass", function(_plain, _subclassed)),
    Case("buffers", function(_with_buffers, _buffers)),
    Case("lightning", Lit),
    Case("nested-functorch", function(_nested)),
    Case(
        "plain-attributes",
        function(_plain, lambda m: setattr(m, "unused", torch.ones(3))),
    ),
    Case("compiled", compiled_root, twin=mlp),
    Case("compiled-inside", compiled_inside, twin=lenet),
    Case("compiled-in-place", compiled_in_place, twin=mlp),
    Case(
        "compiled-function",
        function(lambda m, x: _plain(m, _compiled_function(x))),
        twin=function(lambda m, x: _plain(m, x.sin() * x)),
    ),
    Case("custom-jvp", custom(WithJvp)),
    Case("lstm", lambda: Recurrent(nn.LSTM), path="loop", culprit="core (LSTM)"),
    Case("gru", lambda: Recurrent(nn.GRU), path="loop", culprit="core (GRU)"),
    Case(
        "item",
        function(_item),
        path="loop",
        culprit="the module itself (Function)",
        notes=("batch",),
    ),
    Case("fresh-zeros", function(_fresh_zeros), path="loop", culprit="itself"),
    Case("custom-old", custom(OldStyle), path="loop", culprit="itself"),
    Case("custom-new", custom(NewStyle)),
    Case("custom-wrong-jvp", custom(WrongJvp)),
    *([Case("grid-sample", Warp)] if _warps_twice() else []),
    Case(
        "writes-buffers",
        function(_counted, _register_counters),
        path="",
        notes=("batch", "detach"),
    ),
    Case(
        "writes-attributes",
        function(_accumulate, _accumulator),
        path="loop",
        notes=("batch", "detach"),
    ),
    Case("remembers", function(_remember, _memory), path="", notes=("batch",)),
    Case(
        "checkpoint",
        function(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False).tanh())),
        path="loop",
        culprit="itself",
    ),
    Case("renormalised", function(_renormalised), path=""),
    Case("renormalised-in-place", function(_renormalised_in_place), path=""),
    Case("no-grad", function(_no_grad_norm), path="", notes=("detach",)),
    Case(
        "detached",
        function(lambda m, x: _plain(m, x / x.detach().norm(dim=1, keepdim=True))),
        path="",
        notes=("detach",),
    ),
    Case("rounding", function(_round_trip), path="", notes=("detach",)),
    Case(
        "data", function(lambda m, x: _plain(m, x * x.data)), path="", notes=("detach",)
    ),
    Case("hidden-backward", custom(Constant), path="loop", notes=("detach",)),
]
