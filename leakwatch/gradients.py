"""The map from a sample to the gradient that it would share, and its derivatives.

Everything in leakwatch hangs off this object: its derivative gives every score,
matching its values gives every attack, perturbing them gives every defense.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.modules.module import register_module_forward_pre_hook

from leakwatch.isolation import plain_arithmetic
from leakwatch.losses import classification_criterion

_log = logging.getLogger(__name__)

Criterion: TypeAlias = Callable[[nn.Module, Tensor, Tensor], Tensor]
Path: TypeAlias = Literal["auto", "vmap", "loop"]

# Tangents of all parameters for one chunk of samples stay below this.
_CHUNK_BYTES = 256 * 2**20
# Beyond this a chunk leaves the cache and gets slower per direction.
_CHUNK_MOST = 392
# The two ways of differentiating agree to rounding; a larger gap means that one of
# them is wrong about this network.
_AGREEMENT = {torch.float32: 1e-3, torch.float64: 1e-8}


class UnsupportedModuleError(RuntimeError):
    """A module whose gradient can't be differentiated in the input, and why."""


class GradientMap:
    """Per-sample gradients of a module, and their exact derivatives in the input.

    For one sample, g(x) = ∇_θ ℓ(f_θ(x), y) has d_θ numbers, one for each element of
    each parameter that requires gradients, in the order of ``named_parameters()``;
    frozen parameters are not shared and do not count, unused ones give zeros, tied
    ones count once. Its Jacobian J = ∂g/∂x is d_θ × d_x. Products with J and Jᵀ are
    exact derivatives (forward over reverse), never finite differences.

    The network is evaluated as it is at inference: BatchNorm with running statistics,
    dropout off, eager (also inside compiled modules), attention by its plain formula,
    autocast off. The module itself is left as it was.

    Two paths give the same values: ``"vmap"``, batched over samples, and ``"loop"``,
    sample by sample with double backward, for modules that ``torch.func`` can't
    transform. ``"auto"`` tries the first, checks it against the second on one sample,
    and says in one log line why it changed over.

    Args:
        module: the network; for the default criterion ``forward(x)`` gives logits.
        criterion: ``criterion(module, x, y)`` returns one loss per sample, shape
            ``(batch,)``. Default: accurate cross-entropy of ``module(x)``.
        dtype: arithmetic of every evaluation, float32 or float64, whatever the
            training precision.
        path: ``"auto"``, ``"vmap"`` or ``"loop"``.
        chunk_size: samples evaluated at once; default from the number of parameters.
            Halved and tried again when memory runs out. Results don't depend on it
            beyond rounding.

    Raises:
        ValueError: for another dtype, path or chunk size, or no trainable parameter.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(3, 2)
        >>> gradients = GradientMap(net, dtype=torch.float64)
        >>> x, y = torch.rand(4, 3), torch.tensor([0, 1, 1, 0])
        >>> gradients(x, y).shape  # weight (2, 3) and bias (2,)
        torch.Size([4, 8])
    """

    def __init__(
        self,
        module: nn.Module,
        criterion: Criterion | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        path: Path = "auto",
        chunk_size: int | None = None,
    ) -> None:
        if dtype not in _AGREEMENT:
            raise ValueError(
                f"dtype must be torch.float32 or torch.float64, got {dtype}: second "
                f"derivatives in lower precision carry no usable digits."
            )
        if path not in ("auto", "vmap", "loop"):
            raise ValueError(f"path must be 'auto', 'vmap' or 'loop', got {path!r}.")
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}.")
        self.module = underlying(module)
        self.criterion: Criterion = criterion or classification_criterion
        self.dtype = dtype
        self.chunk_size = chunk_size
        self._loss = _Loss(self.module, self.criterion)
        self._path: Path = path
        _refuse_untrainable(self.module)

    @property
    def path(self) -> Path:
        """``"vmap"`` or ``"loop"`` once known, ``"auto"`` before the first product."""
        return self._path

    @property
    def size(self) -> int:
        """d_θ, the number of shared gradient entries."""
        with _as_evaluated(self._loss):
            return sum(
                p.numel() for p in self._loss.parameters() if p.requires_grad
            )

    def losses(
        self, x: Float[Tensor, "batch ..."], y: Int[Tensor, " batch"]
    ) -> Float[Tensor, " batch"]:
        """The loss of each sample, shape ``(batch,)``, no graph."""
        with self.evaluation(x) as at, torch.no_grad():
            loss: Tensor = functional_call(
                self._loss, (at.shared, at.fixed), (x.to(self.dtype).clone(), y)
            )
            return loss.detach().clone()

    def __call__(
        self,
        x: Float[Tensor, "batch ..."],
        y: Int[Tensor, " batch"],
        weight: Float[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch d_theta"]:
        """Per-sample gradients.

        Args:
            x: network inputs.
            y: labels.
            weight: factor on each sample's loss; a factor 1/‖g‖ keeps confident
                samples inside the range of float32. Default 1.

        Returns:
            ``weight · g``, ``(batch, d_θ)``, in ``dtype``.
        """

        def batched(at: Weights, xs: Tensor, ys: Tensor, ws: Tensor) -> Tensor:
            return vmap(lambda a, b, w: self._gradient(at, a, b, w))(xs, ys, ws)

        def single(at: Weights, xi: Tensor, yi: Tensor, wi: Tensor) -> Tensor:
            return self._graph(at, xi, yi, wi)[1].detach()

        return self._run(batched, single, x, y, self._weight(x, weight))

    def jvp(
        self,
        x: Float[Tensor, "batch ..."],
        y: Int[Tensor, " batch"],
        v: Float[Tensor, "batch d_x"],
        weight: Float[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch d_theta"]:
        """J v of each sample.

        Args:
            x: network inputs.
            y: labels.
            v: one direction per sample, flattened.
            weight: as in :meth:`__call__`.

        Returns:
            ``weight · J v``, ``(batch, d_θ)``.
        """

        def batched(
            at: Weights, xs: Tensor, ys: Tensor, ws: Tensor, vs: Tensor
        ) -> Tensor:
            def one(a: Tensor, b: Tensor, w: Tensor, d: Tensor) -> Tensor:
                return _tangent(lambda q: self._gradient(at, q, b, w), a, d)

            return vmap(one)(xs, ys, ws, vs)

        def single(
            at: Weights, xi: Tensor, yi: Tensor, wi: Tensor, vi: Tensor
        ) -> Tensor:
            return _double_backward(self._graph(at, xi, yi, wi), vi[None])[0]

        return self._run(
            batched, single, x, y, self._weight(x, weight), v.view_as(x)
        )

    def vjp(
        self,
        x: Float[Tensor, "batch ..."],
        y: Int[Tensor, " batch"],
        u: Float[Tensor, "batch d_theta"],
        weight: Float[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch d_x"]:
        """Jᵀ u of each sample, as ∇_x of the directional derivative of ℓ along u.

        Args:
            x: network inputs.
            y: labels.
            u: one vector in gradient space per sample.
            weight: as in :meth:`__call__`.

        Returns:
            ``weight · Jᵀ u``, ``(batch, d_x)``.
        """

        def batched(
            at: Weights, xs: Tensor, ys: Tensor, ws: Tensor, us: Tensor
        ) -> Tensor:
            def one(a: Tensor, b: Tensor, w: Tensor, d: Tensor) -> Tensor:
                towards = _unflatten(d, at.shared)

                def slope(q: Tensor) -> Tensor:
                    along = jvp(
                        lambda p: self.sample_loss(p, at.fixed, q, b, w),
                        (at.shared,),
                        (towards,),
                    )
                    out: Tensor = along[1]
                    return out

                out: Tensor = grad(slope)(a)
                return out.reshape(-1)

            return vmap(one)(xs, ys, ws, us)

        def single(
            at: Weights, xi: Tensor, yi: Tensor, wi: Tensor, ui: Tensor
        ) -> Tensor:
            leaf, g = self._graph(at, xi, yi, wi)
            return _backward(g, leaf, ui).reshape(-1)

        return self._run(batched, single, x, y, self._weight(x, weight), u)

    def dense(
        self,
        x: Float[Tensor, "..."],
        y: Int[Tensor, ""],
        directions: Float[Tensor, "k d_x"],
        weight: Float[Tensor, ""] | None = None,
    ) -> Float[Tensor, "k d_theta"]:
        """J v for many directions v of one sample: the rows of (J V)ᵀ.

        The network itself is evaluated once, only tangents are batched, so this is
        several times cheaper per direction than :meth:`jvp`.

        Args:
            x: one network input (no batch dimension).
            y: its label.
            directions: k directions, flattened; the identity gives Jᵀ row by row.
            weight: as in :meth:`__call__`.

        Returns:
            ``(k, d_θ)``.
        """
        shape = x.shape
        w = self._weight(x[None], None if weight is None else weight[None])[0]

        def batched(at: Weights, vs: Tensor) -> Tensor:
            return vmap(
                lambda d: _tangent(lambda q: self._gradient(at, q, y, w), xi, d)
            )(vs)

        xi = x.detach().to(self.dtype)
        vs = directions.to(self.dtype).view(-1, *x.shape)
        with self.evaluation(x) as at:
            if self.resolve(at, xi[None], y[None]) == "loop":
                return _double_backward(self._graph(at, xi, y, w), vs)
            return in_chunks(lambda d: batched(at, d), (vs,), self.chunk(at))

    # -- one evaluation ------------------------------------------------------------

    def sample_loss(
        self,
        shared: dict[str, Tensor],
        fixed: dict[str, Tensor],
        x: Tensor,
        y: Tensor,
        weight: Tensor | None = None,
    ) -> Tensor:
        # The copy lets a forward write into its input.
        loss: Tensor = functional_call(
            self._loss, (shared, fixed), (x[None].clone(), y[None])
        )
        return loss[0] if weight is None else loss[0] * weight

    def _gradient(
        self, at: Weights, x: Tensor, y: Tensor, weight: Tensor | None = None
    ) -> Tensor:
        g = grad(self.sample_loss)(at.shared, at.fixed, x, y, weight)
        return torch.cat([g[name].reshape(-1) for name in at.shared])

    def _graph(
        self, at: Weights, x: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The input as a leaf, and g as a differentiable function of it."""
        leaf = x.detach().clone().requires_grad_()
        shared = {k: p.detach().requires_grad_() for k, p in at.shared.items()}
        loss = self.sample_loss(shared, at.fixed, leaf, y, weight)
        g = torch.autograd.grad(
            loss, list(shared.values()), create_graph=True, materialize_grads=True
        )
        return leaf, torch.cat([part.reshape(-1) for part in g])

    @contextmanager
    def evaluation(self, x: Tensor) -> Iterator[Weights]:
        """The conditions under which every evaluation runs; all undone afterwards.

        Args:
            x: the inputs, for their device and type.

        Yields:
            The weights at this moment, in ``dtype``.

        Raises:
            ValueError: if ``x`` is not floating point.
        """
        _refuse_bad_input(x)
        with plain_arithmetic(x.device.type), _as_evaluated(self._loss):
            shared, fixed = {}, {}
            for name, p in self._loss.named_parameters():
                into = shared if p.requires_grad else fixed
                into[name] = _cast(p.detach(), self.dtype)
            for name, b in self._loss.named_buffers():
                fixed[name] = _cast(b.detach(), self.dtype).clone()
            yield Weights(shared, fixed)

    def _weight(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return torch.ones(len(x), dtype=self.dtype, device=x.device)
        return weight.to(device=x.device, dtype=self.dtype)

    def _run(
        self,
        batched: Callable[..., Tensor],
        single: Callable[..., Tensor],
        x: Tensor,
        y: Tensor,
        *more: Tensor,
    ) -> Tensor:
        with self.evaluation(x) as at:
            args = (x.detach().to(self.dtype), y, *(t.to(self.dtype) for t in more))
            if self.resolve(at, args[0], y) == "loop":
                rows = [single(at, *row) for row in zip(*args, strict=True)]
                return torch.stack(rows)
            return in_chunks(lambda *part: batched(at, *part), args, self.chunk(at))

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Submodules under the names that their weights have in :class:`Weights`."""
        return self._loss.named_modules()

    def chunk(self, at: Weights) -> int:
        """How many tangents of all parameters are formed at once."""
        each = 2 * self.dtype.itemsize * max(1, at.size)
        return self.chunk_size or min(_CHUNK_MOST, max(1, _CHUNK_BYTES // each))

    # -- which path ----------------------------------------------------------------

    def resolve(self, at: Weights, x: Tensor, y: Tensor) -> Path:
        """The path for this module, found at the first call and kept.

        Args:
            at: the weights of the evaluation in progress.
            x: network inputs.
            y: labels.

        Returns:
            ``"vmap"`` or ``"loop"``.

        Raises:
            UnsupportedModuleError: if neither can differentiate the module.
        """
        if self._path != "auto":
            return self._path
        with torch.no_grad():  # an ordinary error of the module surfaces as itself
            functional_call(self._loss, (at.shared, at.fixed), (x[:1].clone(), y[:1]))
        reason = self._why_not_vmap(at, x, y)
        if reason is None:
            self._path = "vmap"
        else:
            self._path = "loop"
            _log.warning(
                "leakwatch evaluates %s sample by sample: %s. Values are the same, "
                "only slower.",
                type(self.module).__name__,
                reason,
            )
        return self._path

    def _why_not_vmap(self, at: Weights, x: Tensor, y: Tensor) -> str | None:
        # Two samples, because data-dependent code may pass for a batch of one.
        xs, ys = x[:2].detach(), y[:2]
        if len(xs) == 1:
            xs, ys = xs.expand(2, *xs.shape[1:]), ys.expand(2)
        generator = torch.Generator().manual_seed(0)
        v = torch.randn(xs[0].shape, generator=generator, dtype=self.dtype).to(x.device)
        one = xs.new_ones(())

        def product() -> Tensor:
            def sample(a: Tensor, b: Tensor) -> Tensor:
                g = _tangent(lambda q: self._gradient(at, q, b, one), a, v)
                return torch.cat([self._gradient(at, a, b), g])

            return vmap(sample)(xs, ys)[0]

        def reference() -> Tensor:
            leaf, g = self._graph(at, xs[0], ys[0], one)
            return torch.cat([g.detach(), _double_backward((leaf, g), v[None])[0]])

        failure: Exception | None = None
        try:
            fast = product()
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            failure = error
        try:
            slow = reference()
            if not torch.equal(slow, reference()) and torch.isfinite(slow).all():
                raise UnsupportedModuleError(
                    f"{type(self.module).__name__} gives different results for the "
                    f"same input in eval mode; a random forward has no gradient to "
                    f"speak of. Switch the randomness off when module.training is "
                    f"False."
                )
        except UnsupportedModuleError:
            raise
        except Exception as error:
            if failure is None:
                _log.info("no double backward to check against: %s", error)
                return None
            culprit = _culprit(self.module, product)
            raise UnsupportedModuleError(
                f"{type(self.module).__name__} has no second derivative that autograd "
                f"can form{culprit}. Batched: {_first_line(failure)}; sample by "
                f"sample: {_first_line(error)}. Replace that operation, or pass a "
                f"criterion that avoids it."
            ) from error
        if failure is not None:
            culprit = _culprit(self.module, product)
            return f"torch.func can't transform it{culprit} ({_first_line(failure)})"
        if not torch.isfinite(slow).all():
            return None
        gap = float((fast - slow).norm() / slow.norm().clamp_min(1e-30))
        if gap <= _AGREEMENT[self.dtype]:
            return None
        return f"batched and sample-by-sample derivatives differ by {gap:.1e}"


@dataclass(frozen=True)
class Weights:
    """What one evaluation holds constant: shared parameters by name, and the rest."""

    shared: dict[str, Tensor]
    fixed: dict[str, Tensor]

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.shared.values())


class _Loss(nn.Module):
    """Criterion and module as one module, so that its parameters can be replaced."""

    def __init__(self, module: nn.Module, criterion: Criterion) -> None:
        super().__init__()
        self.module = module
        self.criterion = criterion

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.criterion(self.module, x, y)
        if not isinstance(loss, Tensor) or loss.shape != y.shape[:1]:
            given = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss)
            raise ValueError(
                f"criterion(module, x, y) must return one loss per sample, shape "
                f"({len(y)},), but returned {given}; use reduction='none'."
            )
        return loss


def underlying(module: nn.Module) -> nn.Module:
    """The eager module inside a compiled one; any other module as it is.

    Args:
        module: any module.

    Returns:
        ``module`` itself, or what ``torch.compile`` wrapped.
    """
    while isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
        module = inner
    return module


@contextmanager
def _as_evaluated(root: nn.Module) -> Iterator[None]:
    """Inference mode of the network, eager; everything is put back afterwards."""
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(root.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and underlying(child) is not child:
                swapped.append((parent, name, child))
                parent._modules[name] = underlying(child)
    modules = list(root.modules())
    training = [m.training for m in modules]
    # Set by Module.compile(), which compiles in place.
    compiled = [m.__dict__.get("_compiled_call_impl") for m in modules]
    hooks = [_set_aside_watchers(m) for m in modules]
    try:
        for m in modules:
            m.training = False
            if "_compiled_call_impl" in m.__dict__:
                m.__dict__["_compiled_call_impl"] = None
        yield
    finally:
        for m, mode, call, removed in zip(
            modules, training, compiled, hooks, strict=True
        ):
            m.training = mode
            if call is not None:
                m.__dict__["_compiled_call_impl"] = call
            for key, hook in removed:
                m._forward_hooks[key] = hook
            if removed:
                m._forward_hooks.move_to_end(removed[0][0], last=False)
                for key, _ in reversed(removed):
                    m._forward_hooks.move_to_end(key, last=False)
        for parent, name, child in reversed(swapped):
            parent._modules[name] = child


def _set_aside_watchers(module: nn.Module) -> list[tuple[int, Callable[..., Any]]]:
    """Forward hooks of experiment trackers log what they see: not our evaluations."""
    removed = []
    for key, hook in list(module._forward_hooks.items()):
        owner = getattr(hook, "__module__", None) or type(hook).__module__
        if str(owner).split(".")[0] == "wandb":
            removed.append((key, module._forward_hooks.pop(key)))
    return removed


def _tangent(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor:
    out: Tensor = jvp(f, (x,), (v,))[1]
    return out


def _backward(g: Tensor, leaf: Tensor, u: Tensor, graph: bool = False) -> Tensor:
    if not g.requires_grad:  # the gradient doesn't depend on the input at all
        return torch.zeros_like(leaf)
    return torch.autograd.grad(
        g,
        leaf,
        u,
        create_graph=graph,
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )[0]


def _double_backward(graph: tuple[Tensor, Tensor], vs: Tensor) -> Tensor:
    """J v by differentiating u ↦ Jᵀ u, which is linear, once more."""
    leaf, g = graph
    u = torch.zeros_like(g, requires_grad=True)
    pulled = _backward(g, leaf, u, graph=True)
    if not pulled.requires_grad:
        return g.new_zeros(len(vs), g.numel())
    rows = [
        torch.autograd.grad(
            pulled, u, v, retain_graph=True, allow_unused=True, materialize_grads=True
        )[0]
        for v in vs
    ]
    return torch.stack(rows)


def _unflatten(u: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = u.split([p.numel() for p in like.values()])
    return {
        name: part.view(p.shape)
        for (name, p), part in zip(like.items(), parts, strict=True)
    }


def in_chunks(
    f: Callable[..., Tensor], args: tuple[Tensor, ...], chunk: int
) -> Tensor:
    """``f`` over the leading dimension in chunks, halved when memory runs out."""
    out: list[Tensor] = []
    start, total = 0, len(args[0])
    while start < total:
        try:
            out.append(f(*(a[start : start + chunk] for a in args)))
        except RuntimeError as error:
            if not _out_of_memory(error) or chunk == 1:
                raise
            chunk = max(1, chunk // 2)
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            continue
        start += chunk
    return torch.cat(out) if len(out) > 1 else out[0]


def _out_of_memory(error: RuntimeError) -> bool:
    text = str(error)
    return isinstance(error, torch.cuda.OutOfMemoryError) or (
        "can't allocate memory" in text or "out of memory" in text
    )


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype) if t.is_floating_point() else t


def _culprit(module: nn.Module, product: Callable[[], Tensor]) -> str:
    """Names the innermost submodule whose forward was running when it failed."""
    names = {m: n for n, m in module.named_modules()}
    last: list[str] = []

    def note(m: nn.Module, _: object) -> None:
        if m in names:
            last.append(f"{names[m] or 'the module itself'} ({type(m).__name__})")

    handle = register_module_forward_pre_hook(note)
    try:
        product()
    except Exception:
        return f" because of {last[-1]}" if last else ""
    finally:
        handle.remove()
    return ""


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


def _refuse_untrainable(module: nn.Module) -> None:
    if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters()):
        raise ValueError(
            f"{type(module).__name__} has parameters without a shape yet (lazy "
            f"modules); run one forward pass first."
        )
    trainable = [p for p in module.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError(
            f"{type(module).__name__} has no parameter with requires_grad=True, so it "
            f"shares no gradient; unfreeze what clients train."
        )
    if any(p.is_complex() for p in trainable):
        raise ValueError(f"{type(module).__name__} has complex parameters: unsupported.")


def _refuse_bad_input(x: Tensor) -> None:
    if not x.is_floating_point():
        raise ValueError(
            f"inputs must be floating point network inputs, got {x.dtype}; convert "
            f"images with x.float() / 255 and normalise them as in training."
        )
