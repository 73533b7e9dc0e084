"""The map from a sample to the gradient that it would share, and its derivatives.

Everything in leakwatch hangs off this object: its derivative gives every score,
matching its values gives every attack, perturbing them gives every defense.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.func import vmap

from leakwatch.chunking import in_chunks
from leakwatch.evaluation import (
    Criterion,
    SampleLoss,
    UnsupportedModuleError,
    Weights,
    as_evaluated,
    check_module,
    evaluating,
    underlying,
)
from leakwatch.examination import Path, examine
from leakwatch.examination.derivatives import (
    Product,
    gradient,
    graph,
    pulled,
    pulled_back,
    pushed,
    pushed_forward,
)
from leakwatch.filters import ParameterFilter, matching
from leakwatch.inputs import check_rows, check_samples, refuse_integers
from leakwatch.losses import classification_criterion

__all__ = [
    "Criterion",
    "GradientMap",
    "Path",
    "UnsupportedModuleError",
    "Weights",
    "underlying",
]

_log = logging.getLogger(__name__)

# Tangents of all parameters for one chunk of samples stay below this.
_CHUNK_BYTES = 256 * 2**20
# Beyond this a chunk leaves the cache and gets slower per direction.
_CHUNK_MOST = 392


class GradientMap:
    """Per-sample gradients of a module, and their exact derivatives in the input.

    For one sample, g(x) = ∇_θ ℓ(f_θ(x), y) has d_θ numbers, one for each element of
    each parameter that requires gradients, in the order of ``named_parameters()``;
    frozen parameters are not shared and do not count, unused ones give zeros, tied
    ones count once. Its Jacobian J = ∂g/∂x is d_θ × d_x. Products with J and Jᵀ are
    exact derivatives, never finite differences.

    The network is evaluated as it is at inference, each sample alone: BatchNorm with
    running statistics, dropout off, eager (also inside compiled modules), attention by
    its plain formula, autocast off, trackers' hooks aside. The module itself, its
    buffers and plain attributes, and the random streams are left as they were. g is
    the gradient as autograd forms it, before hooks on parameters, clipping or noise.

    Two paths give the same values: ``"vmap"``, batched over samples, forward over
    reverse; and ``"loop"``, sample by sample with double backward, for modules that
    ``torch.func`` can't transform. The first product examines the module on two
    samples: both paths against each other, against a finite difference, and the
    forward for what no derivative sees. What is wrong raises, what a reader should
    know is logged once and kept in ``notes``.

    Args:
        module: the network; for the default criterion ``forward(x)`` gives logits.
        criterion: ``criterion(module, x, y)`` returns one loss per sample, shape
            ``(batch,)``. Default: accurate cross-entropy of ``module(x)``. A criterion
            that is an ``nn.Module`` takes part with its own parameters, after those of
            ``module``; tensors that it closes over are constants.
        parameters: which of the parameters that require gradients are shared: names,
            patterns (``"fc"``, ``["head.*", "*.bias"]``) or a function of name and
            parameter. Default: all.
        dtype: arithmetic of every evaluation, float32 or float64, whatever the
            training precision.
        path: ``"vmap"``, ``"loop"``, or ``"auto"`` for the first that works.
        chunk_size: samples evaluated at once; default from the number of parameters.
            Halved and tried again when memory runs out. Results don't depend on it
            beyond rounding.

    Attributes:
        module: the eager module.
        criterion: the criterion.
        dtype: the arithmetic.
        chunk_size: as given.
        formed: weights that don't come apart as :mod:`leakwatch.layerwise.layers`
            expected, so that their gradients have to be formed whole.
        together: whether :mod:`leakwatch.layerwise.batches` may evaluate a batch in one
            piece; False once that was seen to differ from its samples alone.
        unrecorded: why products are not taken from graphs of its layers; empty while
            nothing speaks against it.

    Raises:
        TypeError: if ``module`` is not an ``nn.Module``.
        ValueError: for another dtype, path or chunk size, no trainable parameter,
            complex parameters, lazy modules, or ``parameters`` that match nothing.
        UnsupportedModuleError: for scripted modules; by the first product, for modules
            whose gradient can't be differentiated in the input.

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
        parameters: ParameterFilter | None = None,
        dtype: torch.dtype = torch.float32,
        path: Path = "auto",
        chunk_size: int | None = None,
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"dtype must be torch.float32 or torch.float64, got {dtype}: second "
                f"derivatives in lower precision carry no usable digits."
            )
        if path not in ("auto", "vmap", "loop"):
            raise ValueError(f"path must be 'auto', 'vmap' or 'loop', got {path!r}.")
        given: object = chunk_size
        if given is not None and not (isinstance(given, int) and given >= 1):
            raise ValueError(
                f"chunk_size must be None or an integer of at least 1, got "
                f"{chunk_size!r}."
            )
        module = underlying(module)
        check_module(module)
        self.module = module
        self.criterion = classification_criterion if criterion is None else criterion
        self.dtype = dtype
        self.chunk_size = chunk_size
        self.formed: set[str] = set()
        self.together = True
        self.unrecorded = ""
        self._loss = SampleLoss(module, self.criterion)
        if parameters is not None:
            with as_evaluated(self._loss):
                known = dict(self._loss.named_parameters())
            prefix = "module."
            by_name = {name.removeprefix(prefix): p for name, p in known.items()}
            chosen = matching(by_name, parameters)
            self._loss.only = frozenset(
                name for name in known if name.removeprefix(prefix) in chosen
            )
        self._path = path
        self._resolved: Literal["vmap", "loop"] | None = None
        self._push: Product = pushed
        self._pull: Product = pulled
        self._notes: dict[str, None] = {}
        self._others: dict[torch.dtype, GradientMap] = {}

    @property
    def path(self) -> Path:
        """``"vmap"`` or ``"loop"`` once known, ``"auto"`` before the first product."""
        return self._resolved or self._path

    @property
    def notes(self) -> tuple[str, ...]:
        """What the first product found out that a reader of results should know."""
        return tuple(self._notes)

    @property
    def size(self) -> int:
        """d_θ, the number of shared gradient entries."""
        return sum(self.sizes().values())

    def sizes(self) -> dict[str, int]:
        """How many entries each shared parameter has, by name, in their order in g."""
        with as_evaluated(self._loss):
            return {
                name.removeprefix("module."): p.numel()
                for name, p in self._loss.named_parameters()
                if self._loss.shares(name, p)
            }

    def in_dtype(self, dtype: torch.dtype) -> GradientMap:
        """The same map in other arithmetic, without a second examination.

        Args:
            dtype: float32 or float64.

        Returns:
            The map itself, or one on the same path once that is known.
        """
        if dtype == self.dtype:
            return self
        other = self._others.get(dtype)
        if other is None:
            other = GradientMap(
                self.module,
                self.criterion,
                dtype=dtype,
                path=self.path,
                chunk_size=self.chunk_size,
            )
            other._loss.only, other.formed = self._loss.only, self.formed
            self._others[dtype] = other
        if self._resolved is not None:
            other._resolved = self._resolved
            other._push, other._pull = self._push, self._pull
            other._loss.caches.slots = self._loss.caches.slots
        return other

    def with_criterion(
        self, criterion: Criterion, dtype: torch.dtype | None = None
    ) -> GradientMap:
        """The same module and shared parameters under another loss.

        Args:
            criterion: see the class.
            dtype: arithmetic. Default: this map's.

        Returns:
            A new map, which is examined at its first product.
        """
        other = GradientMap(
            self.module,
            criterion,
            dtype=self.dtype if dtype is None else dtype,
            path=self._path,
            chunk_size=self.chunk_size,
        )
        other._loss = self.loss_under(criterion)
        return other

    def loss_under(self, criterion: Criterion) -> SampleLoss:
        """The loss of the same module and shared parameters under a criterion.

        Args:
            criterion: see the class.

        Returns:
            A loss that shares what this map shares, with the caches found so far.
        """
        loss = SampleLoss(self.module, criterion)
        loss.only = self._loss.only
        loss.caches.slots = self._loss.caches.slots
        return loss

    def check(
        self, x: Float[Tensor, "batch ..."], y: Shaped[Tensor, "batch ..."]
    ) -> None:
        """Validates inputs and labels, and runs the forward on up to two samples.

        Cheap, with no derivative; what it lets pass can still turn out to be
        unsupported at the first product.

        Args:
            x: network inputs.
            y: labels.

        Raises:
            TypeError: if ``forward`` doesn't return one tensor of logits, or labels
                are not integers (default criterion only).
            ValueError: if inputs are not floating point or not finite, there is not
                one label per sample, the logits have another shape than
                ``(batch, classes)`` or a label lies outside of them (default criterion
                only), the criterion doesn't return one loss per sample, or a loss is
                not finite.
        """
        check_samples(x, y)
        broken = ~torch.isfinite(x.detach()).reshape(len(x), -1).all(1)
        if bool(broken.any()):
            raise ValueError(
                f"the input of sample {int(broken.nonzero()[0])} holds NaN or infinity."
            )
        default = self.criterion is classification_criterion
        if default and (y.is_floating_point() or y.is_complex()):
            raise TypeError(
                f"the default criterion needs integer class labels, got {y.dtype}; "
                f"use y.long(), or pass a criterion for other targets."
            )
        logits: list[Tensor] = []

        def keep(_: object, __: object, out: object) -> None:
            if isinstance(out, Tensor) and out.ndim == 2:
                logits.append(out)

        with self.evaluation(x) as at, torch.no_grad():
            handle = self.module.register_forward_hook(keep)
            try:
                first = zip(*self.prepared(x[:2], y[:2]), strict=True)
                losses = [
                    self.sample_loss(at.shared, at.fixed, xi, yi) for xi, yi in first
                ]
            finally:
                handle.remove()
        if default:
            classes = logits[-1].shape[1]
            wrong = (y < 0) | (y >= classes)
            if bool(wrong.any()):
                i = int(wrong.nonzero()[0])
                raise ValueError(
                    f"label {int(y[i])} of sample {i} is outside the network's "
                    f"classes: its {classes} logits allow labels 0 to "
                    f"{classes - 1}."
                )
            if classes > 1 and all(map(_probabilities, logits)):
                self.note(
                    "its outputs add up to 1, as if softmax had been applied; "
                    "cross-entropy applies it once more. If training does not, pass "
                    "a criterion(module, x, y) that does what training does"
                )
        for i, loss in enumerate(losses):
            if not bool(torch.isfinite(loss)):
                raise ValueError(
                    f"the loss of sample {i} is {float(loss)}; the weights hold NaN "
                    f"or infinity, or the input is far from what the network expects."
                )

    def losses(
        self, x: Float[Tensor, "batch ..."], y: Shaped[Tensor, "batch ..."]
    ) -> Float[Tensor, " batch"]:
        """The loss of each sample, shape ``(batch,)``, no graph."""

        def single(at: Weights, xi: Tensor, yi: Tensor) -> Tensor:
            with torch.no_grad():
                return self.sample_loss(at.shared, at.fixed, xi, yi)

        return self._run(single, single, x, y)

    def __call__(
        self,
        x: Float[Tensor, "batch ..."],
        y: Shaped[Tensor, "batch ..."],
        weight: Float[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch d_theta"]:
        """Per-sample gradients.

        Args:
            x: network inputs.
            y: labels. With the default criterion, one outside the network's classes
                gives NaN here; :meth:`check` raises.
            weight: factor on each sample's loss; a factor 1/‖g‖ keeps confident
                samples inside the range of float32. Default 1.

        Returns:
            ``weight · g``, ``(batch, d_θ)``, in ``dtype``.
        """

        def batched(at: Weights, xi: Tensor, yi: Tensor, wi: Tensor) -> Tensor:
            return gradient(self.sample_loss, at, xi, yi, wi)

        def single(at: Weights, xi: Tensor, yi: Tensor, wi: Tensor) -> Tensor:
            return graph(self.sample_loss, at, xi, yi, wi)[1].detach()

        return self._run(batched, single, x, y, self._weight(x, weight))

    def jvp(
        self,
        x: Float[Tensor, "batch ..."],
        y: Shaped[Tensor, "batch ..."],
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
            at: Weights, xi: Tensor, yi: Tensor, wi: Tensor, vi: Tensor
        ) -> Tensor:
            return self._push(self.sample_loss, at, xi, yi, wi, vi.view_as(xi))

        def single(
            at: Weights, xi: Tensor, yi: Tensor, wi: Tensor, vi: Tensor
        ) -> Tensor:
            sample = graph(self.sample_loss, at, xi, yi, wi)
            return pushed_forward(sample, vi.view_as(xi)[None])[0]

        check_rows("v", v, (len(x), x[:1].numel()))
        return self._run(batched, single, x, y, self._weight(x, weight), v)

    def vjp(
        self,
        x: Float[Tensor, "batch ..."],
        y: Shaped[Tensor, "batch ..."],
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
            at: Weights, xi: Tensor, yi: Tensor, wi: Tensor, ui: Tensor
        ) -> Tensor:
            return self._pull(self.sample_loss, at, xi, yi, wi, ui)

        def single(
            at: Weights, xi: Tensor, yi: Tensor, wi: Tensor, ui: Tensor
        ) -> Tensor:
            sample = graph(self.sample_loss, at, xi, yi, wi)
            return pulled_back(sample, ui).reshape(-1)

        check_rows("u", u, (len(x), self.size))
        return self._run(batched, single, x, y, self._weight(x, weight), u)

    def dense(
        self,
        x: Float[Tensor, "*shape"],
        y: Shaped[Tensor, "*target"],
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
        check_rows("directions", directions, (len(directions), x.numel()))
        w = self._weight(x[None], None if weight is None else weight[None])[0]
        with self.evaluation(x) as at:
            xs, ys = self.prepared(x[None], y[None])
            common = self.sample_loss, at, xs[0], ys[0], w
            vs = directions.detach().to(xs).reshape(-1, *x.shape)
            if self.resolve(at, xs, ys) == "loop":
                with self._loss.holding():
                    return pushed_forward(graph(*common), vs)

            def one(v: Tensor) -> Tensor:
                return self._push(*common, v)

            return in_chunks(vmap(one), (vs,), self.chunk(at))

    # -- one evaluation ------------------------------------------------------------

    def sample_loss(
        self,
        shared: dict[str, Tensor],
        fixed: dict[str, Tensor],
        x: Tensor,
        y: Tensor,
        weight: Tensor | None = None,
    ) -> Tensor:
        """The loss of one sample, a differentiable function of weights and input.

        Args:
            shared: parameters that require gradients, by name.
            fixed: all other parameters and buffers.
            x: one network input, without a batch dimension.
            y: its label.
            weight: factor on the loss.

        Returns:
            A scalar.
        """
        return self._loss.sample(shared, fixed, x, y, weight)

    def batch_loss(
        self,
        shared: dict[str, Tensor],
        fixed: dict[str, Tensor],
        x: Tensor,
        y: Tensor,
        weight: Tensor,
    ) -> Tensor:
        """The sum of the losses of a batch that is evaluated in one piece.

        Args:
            shared: parameters that require gradients, by name.
            fixed: all other parameters and buffers.
            x: network inputs.
            y: labels.
            weight: factor on each loss.

        Returns:
            A scalar. What it does for a sample is what :meth:`sample_loss` does only
            if the network keeps its samples apart.
        """
        buffers = {name for name, _ in self._loss.named_buffers()}
        # As for one sample: a forward may write into its input and buffers.
        own = {k: t.clone() if k in buffers else t for k, t in fixed.items()}
        return self._loss.batch(shared | own, x.clone(), y.clone()) @ weight

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Tells the weights and buffers of now from later ones.

        Seen are writes in place and tensors that take the place of others; not seen
        are writes through ``.data``, which torch does not count.
        """
        own = (*self._loss.parameters(), *self._loss.buffers())
        return tuple((t.data_ptr(), t._version) for t in own)

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
        refuse_integers(x)
        with evaluating(self._loss, x.device.type, self.dtype) as at:
            yield at

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Submodules under the names that their weights have in :class:`Weights`."""
        yield from self._loss.named_modules()

    def prepared(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels, detached, in ``dtype`` and on one device."""
        # Clones made out of inference mode can be saved for a backward pass.
        x = x.detach().to(self.dtype)
        y = y.detach().to(x.device)
        if y.is_floating_point():
            y = y.to(self.dtype)
        return (
            x.clone() if x.is_inference() else x,
            y.clone() if y.is_inference() else y,
        )

    def chunk(self, at: Weights) -> int:
        """How many tangents of all parameters are formed at once."""
        each = 2 * self.dtype.itemsize * max(1, at.size)
        return self.chunk_size or min(_CHUNK_MOST, max(1, _CHUNK_BYTES // each))

    def resolve(self, at: Weights, x: Tensor, y: Tensor) -> Literal["vmap", "loop"]:
        """The path for this module, found at the first call and kept.

        Args:
            at: the weights of the evaluation in progress.
            x: network inputs, in ``dtype``.
            y: labels.

        Returns:
            ``"vmap"`` or ``"loop"``.

        Raises:
            UnsupportedModuleError: if neither gives derivatives that can be trusted.
        """
        if self._resolved is not None:
            return self._resolved
        found = examine(self._loss, at, x, y, self._path)
        self._push, self._pull = found.push, found.pull
        name = type(self.module).__name__
        if found.conclusive:
            self._resolved = found.path
            if found.why:
                _log.warning(
                    "leakwatch evaluates %s sample by sample, which is slower: %s.",
                    name,
                    found.why,
                )
        for note in found.notes:
            self.note(note)
        return found.path

    def note(self, text: str) -> None:
        """Adds to ``notes`` and says it in the log, once."""
        if text not in self._notes:
            self._notes[text] = None
            _log.warning("leakwatch on %s: %s.", type(self.module).__name__, text)

    @property
    def forward_mode(self) -> bool:
        """Whether J v is the tangent of g on the ``"vmap"`` path."""
        return self._push is pushed

    # -- batches -------------------------------------------------------------------

    def _weight(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return torch.ones(len(x), dtype=self.dtype, device=x.device)
        check_rows("weight", weight, (len(x),))
        return weight.detach().to(device=x.device, dtype=self.dtype)

    def _run(
        self,
        batched: Callable[..., Tensor],
        single: Callable[..., Tensor],
        x: Tensor,
        y: Tensor,
        *more: Tensor,
    ) -> Tensor:
        check_samples(x, y)
        with self.evaluation(x) as at:
            xs, ys = self.prepared(x, y)
            args = (xs, ys, *(t.detach().to(xs) for t in more))
            if self.resolve(at, xs, ys) == "loop":
                with self._loss.holding():
                    rows = [single(at, *row) for row in zip(*args, strict=True)]
                return torch.stack(rows)

            def chunk(*part: Tensor) -> Tensor:
                out: Tensor = vmap(lambda *row: batched(at, *row))(*part)
                return out

            return in_chunks(chunk, args, self.chunk(at))


def _probabilities(out: Tensor) -> bool:
    return bool((out >= 0).all() and ((out.sum(1) - 1).abs() < 1e-3).all())
