"""What can be trusted about a module's derivatives, found out once, on two samples.

A derivative can be wrong without an error: a weight that is read behind the module's
back, a part of the forward that autograd takes as constant, a transform that misses a
side effect. So before the first product both ways of differentiating run on the same
samples, next to a finite difference, and the forward is watched operation by
operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leakwatch.derivatives import (
    gradient,
    graph,
    pulled,
    pulled_back,
    pushed,
    pushed_forward,
)
from leakwatch.evaluation import (
    SampleLoss,
    UnsupportedModuleError,
    Weights,
    evaluating,
    watches,
)

__all__ = ["Examination", "Path", "examine", "out_of_memory"]

Path: TypeAlias = Literal["auto", "vmap", "loop"]

# Two correct evaluations agree to rounding; a larger gap means that one is wrong.
_AGREEMENT = {torch.float32: 1e-3, torch.float64: 1e-8}
# Two evaluations of one graph differ at most by the order of a device's atomic adds.
_REPEAT = {torch.float32: 1e-4, torch.float64: 1e-10}
# Relative steps of the finite difference. At the first, few ReLUs of a network cross
# their kink and float64 leaves seven digits; the others are for larger networks and
# for those with a rougher arithmetic of their own.
_STEPS = (1e-7, 1e-9, 1e-5, 1e-3, 1e-2)
_HIDDEN = 2e-2


@dataclass(frozen=True)
class Examination:
    """What was found.

    Attributes:
        path: how to differentiate, ``"vmap"`` or ``"loop"``.
        why: why not batched; empty for ``"vmap"``.
        notes: what a reader of the results should know about the module.
        conclusive: False when the gradient of a sample was zero or not finite, so that
            its derivatives could not be compared.
    """

    path: Literal["vmap", "loop"]
    why: str
    notes: tuple[str, ...]
    conclusive: bool


def examine(
    loss: SampleLoss, at: Weights, x: Tensor, y: Tensor, path: Path
) -> Examination:
    """Compares the ways of differentiating on the first two samples.

    Args:
        loss: module and criterion, under evaluation.
        at: its weights.
        x: inputs, at least one.
        y: labels.
        path: the wanted path.

    Returns:
        The findings.

    Raises:
        UnsupportedModuleError: no path gives derivatives that can be trusted.
    """
    name = type(loss.module).__name__
    xs, ys = x[:2].detach(), y[:2]
    if len(xs) == 1:  # two, because data-dependent code may pass for a batch of one
        xs, ys = torch.cat([xs, xs / 2]), ys.expand(2, *ys.shape[1:])
    watch = _watched(loss, at, xs, ys)
    notes = watch.notes + _batch_dependence(loss, at, xs, ys) + _gradient_hooks(loss)
    if _is_random(loss, at, xs[0], ys[0]):
        raise UnsupportedModuleError(
            f"{name} gives different results for the same input in eval mode; a "
            f"random forward has no gradient to speak of. Switch the randomness off "
            f"when module.training is False."
        )
    products = _Products(loss, at, xs, ys)
    fast, failure = (None, None) if path == "loop" else _attempt(products.by_vmap)
    slow, error = _attempt(products.by_loop)
    why = ""
    if failure is not None:
        culprit = _culprit(loss.module, products.by_vmap, watch)
        why = f"torch.func can't transform it{culprit} ({_first_line(failure)})"
    elif fast is not None and slow is not None and not products.agree(fast, slow):
        why = "batched and sample-by-sample derivatives differ"
    if error is not None and fast is None:
        culprit = _culprit(loss.module, products.by_loop, watch)
        raise UnsupportedModuleError(
            f"{name} has no second derivative that autograd can form: {why or 'loop'}; "
            f"sample by sample neither{culprit} ({_first_line(error)}). Replace that "
            f"operation, or pass a criterion that avoids it."
        ) from error
    if why and path == "vmap":
        raise UnsupportedModuleError(
            f"path='vmap' was asked for, but {name} can't be evaluated that way: "
            f"{why}. Use path='auto' or path='loop'."
        ) from failure
    chosen: Literal["vmap", "loop"] = "loop" if why or path == "loop" else "vmap"
    if products.conclusive and not watch.rounds:
        notes += _hidden_dependence(loss, xs[0], ys[0], chosen)
    return Examination(chosen, why, tuple(notes), products.conclusive)


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that a device ran out of memory."""
    text = str(error)
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(
        phrase in text
        for phrase in (
            "can't allocate memory",
            "out of memory",
            "not enough memory",
            "ALLOC_FAILED",
        )
    )


class _Products:
    """g, J v and Jᵀ u of two samples at one v and u, by either path."""

    def __init__(self, loss: SampleLoss, at: Weights, xs: Tensor, ys: Tensor) -> None:
        self.loss, self.at, self.xs, self.ys = loss.sample, at, xs, ys
        self.v, self.u = _normal(xs, xs.shape[1:]), _normal(xs, (at.size,))
        norms = torch.stack([self._norm(x, y) for x, y in zip(xs, ys, strict=True)])
        self.conclusive = bool(((norms > 0) & torch.isfinite(norms)).all())
        # A confident sample's derivatives would leave the range of float32.
        safe = torch.where(norms > 0, norms.clamp_min(1e-30), torch.ones_like(norms))
        self.w = (1 / safe).to(xs)

    def by_vmap(self) -> list[Tensor]:
        def one(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            common = self.loss, self.at, x, y, w
            return (
                gradient(*common),
                pushed(*common, self.v),
                pulled(*common, self.u),
            )

        return [t.detach() for t in vmap(one)(self.xs, self.ys, self.w)]

    def by_loop(self) -> list[Tensor]:
        rows = []
        for x, y, w in zip(self.xs, self.ys, self.w, strict=True):
            sample = graph(self.loss, self.at, x, y, w)
            back = pulled_back(sample, self.u).reshape(-1)
            rows.append((sample[1], pushed_forward(sample, self.v[None])[0], back))
        return [torch.stack(column).detach() for column in zip(*rows, strict=True)]

    def agree(self, fast: list[Tensor], slow: list[Tensor]) -> bool:
        for a, b in zip(fast, slow, strict=True):
            sound = torch.isfinite(b).all(1)
            a, b = a[sound].double(), b[sound].double()
            size = torch.maximum(a.norm(dim=1), b.norm(dim=1))
            # ‖g‖ is 1, and so is what rounding is measured against.
            noise = 30 * torch.finfo(self.xs.dtype).eps
            allowed = _AGREEMENT[self.xs.dtype] * size + noise
            if not bool(((a - b).norm(dim=1) <= allowed).all()):
                return False
        return True

    def _norm(self, x: Tensor, y: Tensor) -> Tensor:
        one = x.new_ones(())
        common = self.loss, self.at, x, y, one
        g, _ = _attempt(lambda: graph(*common)[1].detach())
        if g is None:
            g, _ = _attempt(lambda: gradient(*common))
        if g is None:
            g = one * torch.nan
        norm: Tensor = torch.linalg.vector_norm(g, dtype=torch.float64)
        return norm


class _Modules:
    """The submodules whose forward is running, innermost last."""

    def __init__(self, module: nn.Module) -> None:
        self.names = {
            m: f"{name or 'the module itself'} ({type(m).__name__})"
            for name, m in module.named_modules()
        }
        self.stack: list[nn.Module] = []

    @property
    def here(self) -> str:
        return self.names[self.stack[-1]] if self.stack else ""

    @contextmanager
    def followed(self) -> Iterator[None]:
        def enter(m: nn.Module, _: object) -> None:
            if m in self.names:
                self.stack.append(m)

        def leave(m: nn.Module, _: object, __: object) -> None:
            while m in self.stack and self.stack.pop() is not m:
                pass

        handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of a forward, below autograd and all transforms."""

    def __init__(self, loss: SampleLoss, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = type(loss.module).__name__
        self.modules = _Modules(loss.module)
        self.dtype = dtype
        self.live = {id(p): n for n, p in loss.named_parameters() if p.requires_grad}
        self.held = {
            value.untyped_storage().data_ptr(): f"{name}.{key}".removeprefix("module.")
            for name, m in loss.named_modules()
            for key, value in vars(m).items()
            if type(value) is Tensor and value.layout == torch.strided
        }
        self.operations: dict[str, str] = {}
        self.lower: dict[torch.dtype, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.operations[func.overloadpacket.__name__] = self.modules.here
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for t in given:
            if id(t) in self.live:
                name = self.live[id(t)].removeprefix("module.")
                raise UnsupportedModuleError(
                    f"{self.name} reads its parameter {name!r} through a reference "
                    f"that is not registered (a plain list, a closure, the criterion), "
                    f"so its gradient would come out incomplete. Read it where it is "
                    f"registered, as in module.{name}."
                )
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        for argument in func._schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for t in tree_leaves((named | kwargs).get(argument.name)):
                self._refuse_write(t)
        out = func(*args, **kwargs)
        if any(t.dtype == self.dtype for t in given):
            for t in tree_leaves(out):
                if self._is_lower(t):
                    self.lower.setdefault(t.dtype, self.modules.here)
        return out

    def _is_lower(self, t: object) -> bool:
        return (
            isinstance(t, Tensor)
            and t.is_floating_point()
            and t.dtype.itemsize < self.dtype.itemsize
        )

    def _refuse_write(self, t: object) -> None:
        if not isinstance(t, Tensor) or t.layout != torch.strided or t.numel() == 0:
            return
        name = self.held.get(t.untyped_storage().data_ptr())
        if name is not None:
            raise UnsupportedModuleError(
                f"the forward of {self.name} writes into {name}, a tensor that is not "
                f"a buffer and could not be given back as it was; make it one with "
                f"register_buffer."
            )

    @property
    def rounds(self) -> bool:
        return bool(self.lower)

    @property
    def notes(self) -> list[str]:
        return [
            f"{where or self.name} converts to {dtype} inside its forward, so results "
            f"are only as accurate as that, not {self.dtype}"
            for dtype, where in self.lower.items()
        ]


def _watched(loss: SampleLoss, at: Weights, xs: Tensor, ys: Tensor) -> _Watch:
    watch = _Watch(loss, xs.dtype)
    with torch.no_grad(), watch.modules.followed():
        for x, y in zip(xs, ys, strict=True):
            with watch:
                loss.sample(at.shared, at.fixed, x, y)
    return watch


def _batch_dependence(
    loss: SampleLoss, at: Weights, xs: Tensor, ys: Tensor
) -> list[str]:
    fixed = {k: t.clone() for k, t in at.fixed.items()}
    with torch.no_grad():
        alone = torch.stack(
            [
                loss.sample(at.shared, at.fixed, x, y)
                for x, y in zip(xs, ys, strict=True)
            ]
        ).double()
        together, _ = _attempt(
            lambda: functional_call(loss, (at.shared, fixed), (xs.clone(), ys))
        )
    if together is None:  # it takes one sample at a time, as it will be given
        return []
    gap = (together.double() - alone).abs()
    if not bool((gap > _AGREEMENT[xs.dtype] * alone.abs()).any()):
        return []
    norms = [
        name
        for name, m in loss.module.named_modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is None
    ]
    because = f", because of batch statistics in {', '.join(norms)}" if norms else ""
    return [
        f"the loss of a sample depends on the others in its batch{because}; every "
        f"sample is evaluated alone, in a batch of one"
    ]


def _gradient_hooks(loss: SampleLoss) -> list[str]:
    names = [
        name.removeprefix("module.")
        for name, p in loss.named_parameters()
        if any(not watches(hook) for hook in (p._backward_hooks or {}).values())
    ]
    if not names:
        return []
    return [
        f"hooks on {', '.join(names[:3])}{' …' if len(names) > 3 else ''} "
        f"(Parameter.register_hook) are not applied: the gradient is that before them"
    ]


def _is_random(loss: SampleLoss, at: Weights, x: Tensor, y: Tensor) -> bool:
    one = x.new_ones(())
    before = _stream(x)
    first, _ = _attempt(lambda: graph(loss.sample, at, x, y, one)[1].detach().double())
    if first is None or not bool(torch.isfinite(first).all()):
        return False
    # A forward that draws numbers may still give the same result most of the time.
    repeats = 1 if torch.equal(before, _stream(x)) else 8
    for _ in range(repeats):
        again = graph(loss.sample, at, x, y, one)[1].detach().double()
        if not bool((again - first).norm() <= _REPEAT[x.dtype] * first.norm()):
            return True
    return False


def _stream(x: Tensor) -> Tensor:
    return torch.cuda.get_rng_state(x.device) if x.is_cuda else torch.get_rng_state()


def _hidden_dependence(
    loss: SampleLoss, x: Tensor, y: Tensor, path: Literal["vmap", "loop"]
) -> list[str]:
    """Compares J v with (g(x + εv) − g(x − εv))/2ε, which nothing can hide from."""
    f = loss.sample
    try:
        with evaluating(loss, x.device.type, torch.float64) as at:
            x = x.double()
            scale = float(x.square().mean().sqrt()) or 1.0
            # Away from the kinks that a blank background and zero biases sit on.
            x = x + 0.01 * scale * _normal(x, x.shape, seed=1)
            v = scale * _normal(x, x.shape)

            def g(at_x: Tensor, w: Tensor) -> Tensor:
                if path == "loop":
                    return graph(f, at, at_x, y, w)[1].detach()
                return gradient(f, at, at_x, y, w)

            one = x.new_ones(())
            w = 1 / g(x, one).norm()
            if path == "loop":
                exact = pushed_forward(graph(f, at, x, y, w), v[None])[0]
            else:
                exact = pushed(f, at, x, y, w, v)
            for step in _STEPS:
                change = (g(x + step * v, w) - g(x - step * v, w)) / (2 * step)
                size = torch.maximum(change.norm(), exact.norm())
                if bool((change - exact).norm() <= _HIDDEN * size + 1e-13 / step):
                    return []
    except Exception:  # no float64 on this device or in this module: no opinion
        return []
    return [
        "the gradient changes with the input in ways that its derivatives do not "
        "show: part of the forward is constant to autograd (detach, no_grad, .data, "
        "rounding, or a custom autograd.Function whose backward is not "
        "differentiable), and that part is left out"
    ]


def _attempt(f: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return f(), None
    except UnsupportedModuleError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        return None, error


def _culprit(module: nn.Module, product: Callable[[], Any], watch: _Watch) -> str:
    """Names the submodule in which, or because of which, a product fails."""
    modules = _Modules(module)
    with modules.followed():
        _, error = _attempt(product)
    where = modules.here
    if not where:  # it failed in a backward pass, whose error may name the operation
        text = str(error)
        known = [name for name in watch.operations if len(name) > 4 and name in text]
        where = watch.operations[max(known, key=len)] if known else ""
    return f" because of {where}" if where else ""


def _normal(like: Tensor, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(like)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
