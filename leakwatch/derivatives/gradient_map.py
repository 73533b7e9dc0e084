"""The gradient map: g of each sample, and products with its Jacobian."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.func import vmap

from leakwatch.checks import check_samples, check_shape
from leakwatch.derivatives.autodiff import (
    LossFunction,
    gradient,
    gradient_by_graph,
    graph,
    pulled_by_graph,
    pushed_by_graph,
    pushed_forward,
)
from leakwatch.derivatives.losses import classification_criterion
from leakwatch.derivatives.network import DifferentiableNetwork
from leakwatch.derivatives.runtime import Weights
from leakwatch.derivatives.runtime.chunking import in_chunks
from leakwatch.derivatives.verification import refuse_stray_reads
from leakwatch.derivatives.verification.compare import (
    SMALL_STEP,
    difference,
    hidden_dependence,
    shows_all,
)
from leakwatch.derivatives.verification.rounding import scales
from leakwatch.status import Status

__all__ = ["GradientMap"]

# Tangents of all parameters for one chunk of samples stay below this.
_CHUNK_BYTES = 256 * 2**20
# Beyond this a chunk leaves the cache and gets slower per direction.
_CHUNK_MOST = 392


@final
class GradientMap(DifferentiableNetwork):
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
        prepare: what becomes of a batch of inputs before the network gets it, such as a
            normalisation that training applies to batches: a differentiable function of
            ``(batch, ...)``. Derivatives are in what goes into it. Default: nothing.
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
        prepare: as given.
        dtype: the arithmetic.
        chunk_size: as given.
        facts: numbers that hold until the network is changed; kept from one map of it
            to the next.
        formed: weights that don't come apart as ``layers.taps``
            expected, so that their gradients have to be formed whole.
        together: whether ``graph_products.batch_products`` may evaluate a batch in one
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
            UnsupportedModuleError: if a parameter is read where it is not registered.
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
                f"use y.long() if these are classes; for other targets pass "
                f"criterion=, a function (module, x, y) that returns one loss per "
                f"sample."
            )
        if default and y.ndim != 1:
            raise ValueError(
                f"the default criterion needs one class label per sample, got labels "
                f"of shape {tuple(y.shape)}; use y.argmax(1) for one-hot labels, or "
                f"pass a criterion for other targets."
            )
        logits, losses = _logits_and_losses(self, x[:2], y[:2])
        if default:
            _check_classes(self, y, logits)
        for i, loss in enumerate(losses):
            if not bool(torch.isfinite(loss)):
                raise ValueError(
                    f"the loss of sample {i} is {float(loss)}; the weights hold NaN "
                    f"or infinity, or the input is far from what the network expects."
                )

    def checked(
        self, x: Float[Tensor, "batch ..."], y: Shaped[Tensor, "batch ..."]
    ) -> tuple[Tensor, Tensor]:
        """Moves samples to the network's device, and validates them there.

        Args:
            x: network inputs, on any device.
            y: labels, on any device.

        Returns:
            Both, detached, on the network's device.

        Raises:
            TypeError: as :meth:`check`.
            ValueError: the same.
        """
        check_samples(x, y)  # says so of what is no tensor, before it is moved
        device = next(self.module.parameters()).device
        # First, because the check runs the network on them.
        x, y = x.detach().to(device), y.to(device)
        self.check(x, y)
        return x, y

    def losses(
        self, x: Float[Tensor, "batch ..."], y: Shaped[Tensor, "batch ..."]
    ) -> Float[Tensor, " batch"]:
        """The loss of each sample, shape ``(batch,)``, no graph."""

        def loss(f: LossFunction, at: Weights, xi: Tensor, yi: Tensor) -> Tensor:
            with torch.no_grad():
                return f(at.shared, at.fixed, xi, yi)

        return self._run(loss, loss, x, y)

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
        w = self._weight(x, weight)
        return self._run(gradient, gradient_by_graph, x, y, w)

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

        def push(*arguments: Any) -> Tensor:  # found by the first product
            return self._push(*arguments)

        check_shape("v", v, (len(x), x[:1].numel()))
        w = self._weight(x, weight)
        return self._run(push, pushed_by_graph, x, y, w, v.reshape(x.shape))

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

        def pull(*arguments: Any) -> Tensor:  # found by the first product
            return self._pull(*arguments)

        check_shape("u", u, (len(x), self.size))
        w = self._weight(x, weight)
        return self._run(pull, pulled_by_graph, x, y, w, u)

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
        check_shape("directions", directions, (len(directions), x.numel()))
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

    def shows_all(
        self,
        x: Float[Tensor, "batch ..."],
        y: Shaped[Tensor, "batch ..."],
        v: Float[Tensor, "batch d_x"],
        there: Float[Tensor, "batch d_theta"],
        weight: Float[Tensor, " batch"],
    ) -> Bool[Tensor, " batch"]:
        """Whether J v of each sample is what a finite difference says, in float64.

        Args:
            x: network inputs.
            y: labels.
            v: a standard normal direction for each.
            there: ``weight · J v``.
            weight: as in :meth:`__call__`, about 1/‖g‖, a power of two.

        Returns:
            False where part of J is missing, and where kinks are in the way.
        """
        slow = functools.partial(shows_all, g=gradient_by_graph)
        w, step = self._weight(x, weight), self.step(x)
        return self._run(shows_all, slow, x, y, w, v.reshape(x.shape), step, there)

    def difference(
        self,
        x: Float[Tensor, "batch ..."],
        y: Shaped[Tensor, "batch ..."],
        v: Float[Tensor, "batch d_x"],
        weight: Float[Tensor, " batch"],
    ) -> Float[Tensor, "batch d_theta"]:
        """``weight · J v`` as a finite difference; arguments as :meth:`shows_all`."""
        slow = functools.partial(difference, g=gradient_by_graph)
        w, step = self._weight(x, weight), self.step(x)
        return self._run(difference, slow, x, y, w, v.reshape(x.shape), step)

    def step(self, x: Float[Tensor, "batch ..."]) -> Float[Tensor, " batch"]:
        """Of the :meth:`difference` of each sample."""
        return SMALL_STEP * scales(x)

    def hidden_dependence(
        self,
        x: Float[Tensor, "*shape"],
        y: Shaped[Tensor, "*target"],
        weight: Float[Tensor, ""],
    ) -> Status:
        """What results about one sample are worth, by finite differences, in float64.

        Args:
            x: one network input (no batch dimension), in general position.
            y: its label.
            weight: as in :meth:`shows_all`.

        Returns:
            ``ok``, or ``failed`` or ``estimated`` with a reason.
        """
        w = self._weight(x[None], weight[None])[0]
        with self.evaluation(x) as at:
            xs, ys = self.prepared(x[None], y[None])
            path = self.resolve(at, xs, ys)
            eps = torch.finfo(self.dtype).eps
            common = self.sample_loss, at, xs[0], ys[0], w
            with self._loss.holding():
                return hidden_dependence(*common, path, self._push, eps)[0]

    def chunk(self, at: Weights) -> int:
        """How many tangents of all parameters are formed at once."""
        each = 2 * self.dtype.itemsize * max(1, at.size)
        return self.chunk_size or min(_CHUNK_MOST, max(1, _CHUNK_BYTES // each))

    def _weight(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return torch.ones(len(x), dtype=self.dtype, device=x.device)
        check_shape("weight", weight, (len(x),))
        return weight.detach().to(device=x.device, dtype=self.dtype)

    def _run(
        self,
        batched: Callable[..., Tensor],
        single: Callable[..., Tensor],
        x: Tensor,
        y: Tensor,
        *more: Tensor,
    ) -> Tensor:
        """Rows of either: functions of loss, weights, x, y and whatever ``more`` is."""
        check_samples(x, y)
        loss = self.sample_loss
        with self.evaluation(x) as at:
            xs, ys = self.prepared(x, y)
            args = (xs, ys, *(t.detach().to(xs) for t in more))
            if self.resolve(at, xs, ys) == "loop":
                with self._loss.holding():
                    rows = [single(loss, at, *row) for row in zip(*args, strict=True)]
                return torch.stack(rows)

            def chunk(*part: Tensor) -> Tensor:
                out: Tensor = vmap(lambda *row: batched(loss, at, *row))(*part)
                return out

            return in_chunks(chunk, args, self.chunk(at))


# What torch says of inputs that have another shape than a layer expects.
_MISFIT = re.compile(r"shape|size|channels|dimension|expected.*input", re.IGNORECASE)


def _logits_and_losses(
    network: GradientMap, x: Tensor, y: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """What looks like logits, and the loss of each sample."""
    logits: list[Tensor] = []

    def keep(_: object, __: object, out: object) -> None:
        if isinstance(out, Tensor) and out.ndim == 2:
            logits.append(out)

    with network.evaluation(x) as at, torch.no_grad():
        if not network.recall(*network.prepared(x, y)):
            refuse_stray_reads(network._loss, at, *network.prepared(x, y))
        handle = network.module.register_forward_hook(keep)
        try:
            samples = zip(*network.prepared(x, y), strict=True)
            losses = [
                network.sample_loss(at.shared, at.fixed, xi, yi) for xi, yi in samples
            ]
        except RuntimeError as error:
            if type(error) is RuntimeError and _MISFIT.search(str(error)):
                raise ValueError(
                    f"the network can't take inputs of shape {tuple(x.shape[1:])} each "
                    f"({error}); give x as training gives it, (batch, channels, "
                    f"height, width) for most networks of images."
                ) from error
            raise
        finally:
            handle.remove()
    return logits, losses


def _check_classes(network: GradientMap, y: Tensor, logits: list[Tensor]) -> None:
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
        network.note(
            "its outputs add up to 1, as if softmax had been applied; "
            "cross-entropy applies it once more. If training does not, pass "
            "a criterion(module, x, y) that does what training does"
        )


def _probabilities(out: Tensor) -> bool:
    return bool((out >= 0).all() and ((out.sum(1) - 1).abs() < 1e-3).all())
