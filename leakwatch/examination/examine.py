"""What can be trusted about a module's derivatives, found out once, on two samples.

A derivative can be wrong without an error: a weight that is read behind the module's
back, a part of the forward that autograd takes as constant, a transform that misses a
side effect. So before the first product both ways of differentiating run on the same
samples, next to a finite difference, and the forward is watched operation by
operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import vmap

from leakwatch.chunking import out_of_memory
from leakwatch.evaluation import (
    SampleLoss,
    UnsupportedModuleError,
    Weights,
    evaluating,
    watches,
)
from leakwatch.examination.derivatives import (
    Graph,
    Product,
    gradient,
    graph,
    pulled,
    pulled_back,
    pulled_by_reverse,
    pushed,
    pushed_by_reverse,
    pushed_forward,
)
from leakwatch.examination.rounding import Rounding
from leakwatch.examination.watching import ForwardWatch, RunningModules, watch_forward

__all__ = ["Examination", "Path", "examine"]

Path: TypeAlias = Literal["auto", "vmap", "loop"]

# Two correct evaluations agree to rounding; a larger gap means that one is wrong.
_AGREEMENT = {torch.float32: 1e-4, torch.float64: 1e-8}
# Two evaluations of one graph differ at most by the order of a device's atomic adds.
_REPEAT = {torch.float32: 1e-4, torch.float64: 1e-10}
# Relative steps of the finite difference. At the first, few ReLUs of a network cross
# their kink and float64 leaves seven digits; the others are for larger networks and
# for those with a rougher arithmetic of their own.
_STEPS = (1e-7, 1e-9, 1e-5, 1e-3, 1e-2)
_HIDDEN = 2e-2
_REMEDIES = {
    "scaled_dot_product": "leave the choice of an attention kernel to torch",
}


@dataclass(frozen=True)
class Examination:
    """What was found.

    Attributes:
        path: how to differentiate, ``"vmap"`` or ``"loop"``.
        push: J v on the ``"vmap"`` path.
        pull: Jᵀ u on the ``"vmap"`` path.
        why: why not batched; empty for ``"vmap"``.
        notes: what a reader of the results should know about the module.
        conclusive: False when the gradient of a sample was zero or not finite, so that
            its derivatives could not be compared.
    """

    path: Literal["vmap", "loop"]
    push: Product
    pull: Product
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
    with torch.no_grad():
        loss.caches.find(
            loss.module,
            lambda i: loss.sample(at.shared, at.fixed, xs[i] / (i + 1), ys[i]),
        )
    watch = watch_forward(loss, at, xs, ys)
    loss.tensors.written = (loss.tensors.written or frozenset()) | watch.written
    shaken = _shaken(at)
    rounding = Rounding(watch.lower)
    if _is_random(loss, shaken, xs[0], ys[0]):
        raise UnsupportedModuleError(
            f"{name} gives different results for the same input in eval mode; a "
            f"random forward has no gradient to speak of. Switch the randomness off "
            f"when module.training is False."
        )
    notes = (
        watch.notes
        + _batch_dependence(loss, shaken, xs, ys, rounding)
        + _gradient_hooks(loss)
    )
    with _precisely(loss, at, xs, ys, watch) as (at, xs, ys), loss.holding():
        products = _products(loss, at, shaken, xs, ys, rounding)
        slow, error = _attempt(products.reference)
        push: Product = pushed
        pull: Product = pulled
        why = ""
        if path != "loop":
            push, pull, failure = products.ways(slow)
            if failure is not None:
                culprit = _culprit(loss.module, failure.product, watch)
                why = f"torch.func {failure.text}{culprit}{failure.detail}"
        if why and path == "vmap":
            raise UnsupportedModuleError(
                f"path='vmap' was asked for, but {name} can't be evaluated that way: "
                f"{why}. Use path='auto' or path='loop'."
            )
        chosen: Literal["vmap", "loop"] = "loop" if why or path == "loop" else "vmap"
        if chosen == "loop" and error is None:
            _, error = _attempt(products.by_loop)
        if chosen == "loop" and error is not None:
            culprit = _culprit(loss.module, products.by_loop, watch)
            raise UnsupportedModuleError(
                f"{name} has no second derivative that autograd can form"
                f"{f': {why}' if why else ''}; sample by sample{culprit}: "
                f"{_first_line(error)}. Replace that operation{_remedy(error)}, or "
                f"pass a criterion that avoids it."
            ) from error
        if products.conclusive and xs.dtype == torch.float64 and not watch.rounds:
            notes += products.hidden_dependence(chosen, push)
    notes += rounding.notes(x.dtype)
    return Examination(chosen, push, pull, why, tuple(notes), products.conclusive)


@dataclass(frozen=True)
class _Failure:
    """Why torch.func gives no derivative: of which product, in which words."""

    product: Callable[[], Any]
    text: str
    detail: str = ""


class _Products:
    """g, J v and Jᵀ u of two samples at one v and u, by every way."""

    def __init__(
        self, loss: SampleLoss, at: Weights, xs: Tensor, ys: Tensor, rounding: Rounding
    ) -> None:
        self.loss, self.at, self.xs, self.ys = loss.sample, at, xs, ys
        self.rounding = rounding
        self.v, self.u = _normal(xs, xs.shape[1:]), _normal(xs, (at.size,))
        norms = torch.stack([self._norm(x, y) for x, y in zip(xs, ys, strict=True)])
        self.conclusive = bool(((norms > 0) & torch.isfinite(norms)).all())
        # A confident sample's derivatives would leave the range of float32.
        safe = torch.where(norms > 0, norms.clamp_min(1e-30), torch.ones_like(norms))
        self.w = (1 / safe).to(xs)

    def reference(self) -> tuple[Tensor, Tensor]:
        """The first sample's g and Jᵀ u by double backward."""
        sample = self._graph()
        return sample[1].detach(), pulled_back(sample, self.u).reshape(-1)

    def by_loop(self) -> Tensor:
        """The first sample's J v by double backward."""
        return pushed_forward(self._graph(), self.v[None])[0]

    def batched(self, product: Callable[..., Tensor], *direction: Tensor) -> Tensor:
        """The first sample's result, evaluated together with the second."""

        def one(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
            return product(self.loss, self.at, x, y, w, *direction)

        out: Tensor = vmap(one)(self.xs, self.ys, self.w)
        return out[0].detach()

    def ways(
        self, slow: tuple[Tensor, Tensor] | None
    ) -> tuple[Product, Product, _Failure | None]:
        """The cheapest J v and Jᵀ u that agree with the loop, or why there is none.

        Of J v the agreement is that of ⟨u, J v⟩ with ⟨Jᵀ u, v⟩: by the loop it would
        cost more than everything else together.
        """
        failures: list[_Failure] = []

        def image(product: Callable[..., Tensor], *direction: Tensor) -> Tensor | None:
            run = functools.partial(self.batched, product, *direction)
            found: Tensor | None
            found, error = _attempt(run)
            if error is not None:
                detail = f" ({_first_line(error)})"
                failures.append(_Failure(run, "can't transform it", detail))
            return found

        def differ(product: Callable[..., Tensor], *direction: Tensor) -> None:
            run = functools.partial(self.batched, product, *direction)
            text = "and double backward differ, and the latter is used"
            failures.append(_Failure(run, text))

        g = image(gradient)
        if g is not None and slow is not None and not self.agree(g, slow[0], self._g):
            differ(gradient)
        if failures:
            return pushed, pulled, failures[0]
        for pull in (pulled, pulled_by_reverse):
            back = image(pull, self.u)
            if back is None:
                continue
            if slow is not None and not self.agree(back, slow[1], self._back):
                differ(pull, self.u)
                continue
            for push in (pushed, pushed_by_reverse):
                there = image(push, self.v)
                if there is None:
                    continue
                if self.adjoint(there, back):
                    return push, pull, None
                differ(push, self.v)
        return pushed, pulled, failures[0]

    def agree(
        self, a: Tensor, b: Tensor, result: Callable[[Weights, Tensor], Tensor]
    ) -> bool:
        """Equal but for rounding; not a number agrees with everything."""
        size = max(float(a.double().norm()), float(b.double().norm()))
        return self._same(float((a.double() - b.double()).norm()), size, result)

    def adjoint(self, there: Tensor, back: Tensor) -> bool:
        """Whether ⟨u, J v⟩ = ⟨Jᵀ u, v⟩ but for rounding."""
        one = there.double() @ self.u.double()
        other = back.double() @ self.v.double().reshape(-1)
        size = max(float(there.double().norm()), float(back.double().norm()))
        return self._same(float((one - other).abs()), size, self._back)

    def _same(
        self, gap: float, size: float, result: Callable[[Weights, Tensor], Tensor]
    ) -> bool:
        if not gap > self._allowed(size):
            return True
        found, _ = _attempt(
            lambda: self.rounding.explains(gap, result, self.at, self.xs[0])
        )
        return bool(found)

    def _allowed(self, size: float) -> float:
        # ‖g‖ is 1, and so is what rounding is measured against.
        noise = 30 * torch.finfo(self.xs.dtype).eps
        return _AGREEMENT[self.xs.dtype] * size + noise

    def _graph(self) -> Graph:
        return graph(self.loss, self.at, self.xs[0], self.ys[0], self.w[0])

    def _g(self, at: Weights, x: Tensor) -> Tensor:
        return graph(self.loss, at, x, self.ys[0], self.w[0])[1].detach()

    def _back(self, at: Weights, x: Tensor) -> Tensor:
        return pulled_back(graph(self.loss, at, x, self.ys[0], self.w[0]), self.u)

    def hidden_dependence(
        self, path: Literal["vmap", "loop"], push: Product
    ) -> list[str]:
        """Compares J v with (g(x + εv) − g(x − εv))/2ε: nothing can hide from that."""
        at, f, y = self.at, self.loss, self.ys[0]
        x = self.xs[0]
        v = _scale(x) * self.v

        def g(at_x: Tensor, w: Tensor) -> Tensor:
            if path == "loop":
                return graph(f, at, at_x, y, w)[1].detach()
            return gradient(f, at, at_x, y, w)

        w = self.w[0]
        settled, last = False, torch.full_like(self.u, torch.nan)
        if path == "loop":
            exact = pushed_forward(graph(f, at, x, y, w), v[None])[0]
        else:
            exact = push(f, at, x, y, w, v)
        for step in _STEPS:
            change = (g(x + step * v, w) - g(x - step * v, w)) / (2 * step)
            size = torch.maximum(change.norm(), exact.norm())
            if bool((change - exact).norm() <= _HIDDEN * size + 1e-13 / step):
                return []
            size = torch.maximum(change.norm(), last.norm())
            settled |= bool((change - last).norm() <= _HIDDEN * size + 1e-13 / step)
            last = change
        if not bool(torch.isfinite(exact).all()):
            return []
        if not settled:
            return [
                "no finite difference of its gradient settles (every step gives "
                "another slope), so whether part of its forward is constant to "
                "autograd could not be found out"
            ]
        return [
            "the gradient changes with the input in ways that its derivatives do not "
            "show: part of the forward is constant to autograd (detach, no_grad, "
            ".data, rounding, or a custom autograd.Function whose backward is not "
            "differentiable), and that part is left out"
        ]

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


def _products(
    loss: SampleLoss,
    at: Weights,
    shaken: Weights,
    xs: Tensor,
    ys: Tensor,
    rounding: Rounding,
) -> _Products:
    """At weights and inputs in general position, if these give a gradient.

    What is found holds for the rest of a training, so it must not rest on what is
    zero at its start: the weights of a last layer, biases, a blank background.
    """
    moved = xs + 0.01 * _scale(xs) * _normal(xs, xs.shape, seed=1)
    shared = {name: t.to(xs) for name, t in shaken.shared.items()}
    products = _Products(loss, Weights(shared, at.fixed), moved, ys, rounding)
    return products if products.conclusive else _Products(loss, at, xs, ys, rounding)


def _shaken(at: Weights) -> Weights:
    shared = {}
    generator = torch.Generator().manual_seed(0)
    for name, t in at.shared.items():
        noise = torch.rand(t.shape, generator=generator).to(t) - 0.5
        # Signs are kept: a weight may be under a root or a logarithm.
        shared[name] = torch.where(t == 0, 0.02 * noise, t * (1 + 0.2 * noise))
    return Weights(shared, at.fixed)


def _scale(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) or 1.0


def _batch_dependence(
    loss: SampleLoss, at: Weights, xs: Tensor, ys: Tensor, rounding: Rounding
) -> list[str]:
    fixed = {k: t.clone() for k, t in at.fixed.items()}

    def each(at: Weights, xs: Tensor) -> Tensor:
        pairs = zip(xs, ys, strict=True)
        return torch.stack([loss.sample(at.shared, at.fixed, x, y) for x, y in pairs])

    with torch.no_grad():
        alone = each(at, xs).double()
        together, _ = _attempt(
            lambda: loss.batch(at.shared | fixed, xs.clone(), ys.clone())
        )
        if together is None:  # it takes one sample at a time, as it will be given
            return []
        gap = (together.double() - alone).abs()
        if not bool((gap > _AGREEMENT[xs.dtype] * alone.abs()).any()):
            return []
        if rounding.explains(float(gap.norm()), each, at, xs):
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
    def value() -> Tensor:
        with torch.no_grad():
            return loss.sample(at.shared, at.fixed, x, y).double()

    before = _stream(x)
    first = value()
    # A forward that draws numbers may still give the same result most of the time.
    repeats = 1 if torch.equal(before, _stream(x)) else 8
    limit = _REPEAT[x.dtype] * first.abs()
    return any(bool((value() - first).abs() > limit) for _ in range(repeats))


def _stream(x: Tensor) -> Tensor:
    return torch.cuda.get_rng_state(x.device) if x.is_cuda else torch.get_rng_state()


@contextmanager
def _precisely(
    loss: SampleLoss, at: Weights, xs: Tensor, ys: Tensor, watch: ForwardWatch
) -> Iterator[tuple[Weights, Tensor, Tensor]]:
    """The samples and weights in float64, where device and module have it.

    A rule that is wrong by 1e-4 can't be told from rounding in float32.
    """
    if xs.dtype == torch.float64 or watch.rounds:
        yield at, xs, ys
        return
    with ExitStack() as stack:
        try:
            precise = stack.enter_context(
                evaluating(loss, xs.device.type, torch.float64)
            )
            ds = ys.double() if ys.is_floating_point() else ys
            again = watch_forward(loss, precise, xs.double(), ds)
        except UnsupportedModuleError:
            raise
        except Exception:
            again = watch
        if again is watch or again.rounds:
            stack.close()
            yield at, xs, ys
        else:
            yield precise, xs.double(), ds


def _attempt(f: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return f(), None
    except UnsupportedModuleError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        return None, error


def _culprit(module: nn.Module, product: Callable[[], Any], watch: ForwardWatch) -> str:
    """Names the submodule in which, or because of which, a product fails."""
    modules = RunningModules(module)
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


def _remedy(error: BaseException) -> str:
    found = [r for name, r in _REMEDIES.items() if name in str(error)]
    return f" ({found[0]})" if found else ""


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
