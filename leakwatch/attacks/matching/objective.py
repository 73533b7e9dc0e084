"""Gradient matching for many attacks at once: the objective and its derivative.

A :class:`MatchingProblem` says what is to be matched. Opened, it gives a
:class:`Matcher`, which evaluates it: in chunks, with gradients on a scale of one, and
by the path that is fastest.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import final
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from leakwatch.attacks.matching import distances
from leakwatch.attacks.matching.distances import Distance
from leakwatch.attacks.matching.engines import Path, VmapPath, watched_norms
from leakwatch.attacks.matching.layerwise import LayerwisePath
from leakwatch.attacks.matching.priors import BatchStatistics, batch_norm_distance
from leakwatch.attacks.matching.selection import PathName, built, choose
from leakwatch.attacks.shared_gradient import SharedGradient
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.losses import classification_criterion
from leakwatch.derivatives.runtime import SampleLoss, Weights, evaluating
from leakwatch.derivatives.runtime.chunking import out_of_memory, release
from leakwatch.derivatives.safe_ops.substitutes import substituting

__all__ = ["Evaluation", "Matcher", "MatchingProblem", "PathName", "soft_criterion"]

_log = logging.getLogger(__name__)

# The paths chosen for networks so far: finding one takes about ten evaluations.
_CHOICES: WeakKeyDictionary[GradientMap, dict[object, str]] = WeakKeyDictionary()

# Gradients and their cotangents of one chunk stay below this.
_CHUNK_BYTES = 512 * 2**20
# More samples at once leave the cache.
_CHUNK_SAMPLES = 64


def soft_criterion(
    module: nn.Module, x: Float[Tensor, "batch ..."], y: Float[Tensor, "batch classes"]
) -> Float[Tensor, " batch"]:
    """Cross-entropy with a distribution over classes as the target.

    Zhu et al., "Deep Leakage from Gradients" (NeurIPS 2019), Section 3.2, optimise the
    target together with the image.

    Args:
        module: a network whose ``forward(x)`` gives logits.
        x: network inputs.
        y: probabilities of the classes.

    Returns:
        −Σ_k y_k log softmax(logits)_k for each sample, in nats.
    """
    logits: Tensor = module(x)
    return -(y * logits.log_softmax(1)).sum(1)


@final
@dataclass(frozen=True)
class Evaluation:
    """The objective at some images.

    Attributes:
        distance: between gradients, without priors, ``(attacks,)``.
        objective: the same, divided where it is relative, with the BatchNorm prior.
        gradient: of the objective in the images, ``(attacks, images, *sample)``.
        target_gradient: of it in soft targets, ``(attacks, images, classes)``.
    """

    distance: Float[Tensor, " attacks"]
    objective: Float[Tensor, " attacks"]
    gradient: Float[Tensor, "attacks images ..."]
    target_gradient: Float[Tensor, "attacks images classes"] | None = None


@final
class MatchingProblem:
    """Distances between the gradients of guessed images and shared ones.

    Attacks are independent: each has its own images and one of the targets. The
    gradient is that of the mean loss over the images of an attack, every sample
    evaluated as :class:`GradientMap` evaluates it.

    Args:
        gradients: the map from samples to gradients.
        shared: the targets.
        distance: ``"l2"``, ``"cosine"`` or ``"l1"``.
        layer_weights: factor of each parameter tensor's part of the distance: by name
            (others 1), or one for each tensor in the order of ``named_parameters()``.
        batch_norm: weight of the BatchNorm prior, see
            :func:`leakwatch.attacks.matching.priors.batch_norm_distance`.
        first_layer: factor on its first layer.
        statistics: the client's own batch statistics, if the attacker is granted them:
            mean and variance ``(targets, channels)`` at the input of each BatchNorm
            layer in the order of the forward. Default: the running statistics, which
            every server knows.
        relative: whether the objective's distance is divided by ‖g*‖² (L2) or ‖g*‖
            (L1), so that priors weigh the same for all targets.
        soft_targets: whether labels are distributions over classes that are optimised
            too; only for the default criterion.
        path: ``"layerwise"``, ``"vmap"``, ``"loop"``, or ``"auto"`` for the fastest of
            those that give the values of the loop, found by timing each once.
        chunk_size: attacks evaluated at once; default from the number of parameters
            and images.

    Raises:
        ValueError: for an unknown distance or path, layer weights that fit no
            parameter, a gradient of another size than the module's, soft targets with
            a criterion of one's own, or statistics of another number than there are
            BatchNorm layers.
    """

    def __init__(
        self,
        gradients: GradientMap,
        shared: SharedGradient,
        distance: str | Distance = "l2",
        *,
        layer_weights: Mapping[str, float] | Sequence[float] | None = None,
        batch_norm: float = 0.0,
        first_layer: float = 10.0,
        statistics: BatchStatistics | None = None,
        relative: bool = False,
        soft_targets: bool = False,
        path: PathName = "auto",
        chunk_size: int | None = None,
    ) -> None:
        if path not in ("auto", "layerwise", "vmap", "loop"):
            raise ValueError(
                f"path must be 'auto', 'layerwise', 'vmap' or 'loop', got {path!r}."
            )
        criterion = gradients.criterion
        if soft_targets:
            if criterion is not classification_criterion:
                raise ValueError(
                    "soft targets need the default criterion, cross-entropy of "
                    "module(x); give the labels instead."
                )
            criterion = soft_criterion
        size = gradients.size
        if shared.gradient.shape[1] != size:
            raise ValueError(
                f"the shared gradients have {shared.gradient.shape[1]} entries, but "
                f"the module shares {size}; was another model, or a frozen part, used?"
            )
        self.gradients = gradients
        self.shared = shared
        self.distance = (
            distance if isinstance(distance, Distance) else distances.get(distance)
        )
        self.batch_norm = batch_norm
        self.first_layer = first_layer
        self.statistics = statistics
        self.relative = relative
        self.soft_targets = soft_targets
        self.path_name = path
        if chunk_size is None:
            each = 4 * gradients.dtype.itemsize * size
            chunk_size = max(1, _CHUNK_SAMPLES // shared.images)
            chunk_size = max(1, min(chunk_size, _CHUNK_BYTES // each))
        self.chunk_size = chunk_size
        self._layer_weights = layer_weights
        self._loss = gradients.loss_under(criterion)

    @contextmanager
    def opened(self) -> Iterator[Matcher]:
        """Evaluates under the conditions of :class:`GradientMap`, set up once.

        Yields:
            What evaluates, until the context ends. The weights are those of now.
        """
        device = next(self.gradients.module.parameters()).device
        dtype = self.gradients.dtype
        conditions = evaluating(self._loss, device.type, dtype, substitutes=False)
        with conditions as at, ExitStack() as stack:
            yield Matcher(self, self._loss, at, device, stack)

    def entry_weights(self, at: Weights) -> Tensor | None:
        """The layer weight of every entry, ``None`` when all are 1."""
        factors = self._layer_weights
        if factors is None:
            return None
        names = [name.removeprefix("module.") for name in at.shared]
        if isinstance(factors, Mapping):
            unknown = factors.keys() - set(names)
            if unknown:
                raise ValueError(
                    f"layer_weights name {', '.join(sorted(unknown))}, but the shared "
                    f"parameters are {', '.join(names)}."
                )
            numbers = [float(factors.get(name, 1.0)) for name in names]
        else:
            numbers = [float(n) for n in factors]
        if len(numbers) != len(names) or not all(
            math.isfinite(n) and n >= 0 for n in numbers
        ):
            raise ValueError(
                f"layer_weights must be {len(names)} finite numbers of at least 0, one "
                f"for each shared parameter tensor, got {numbers}."
            )
        return torch.cat(
            [
                p.new_full((p.numel(),), n)
                for n, p in zip(numbers, at.shared.values(), strict=True)
            ]
        )


@final
class Matcher:
    """Evaluates a :class:`MatchingProblem`, inside of its context.

    Args:
        problem: the problem.
        loss: module and criterion.
        at: the weights.
        device: where they are.
        stack: ends with the context.
    """

    def __init__(
        self,
        problem: MatchingProblem,
        loss: SampleLoss,
        at: Weights,
        device: torch.device,
        stack: ExitStack,
    ) -> None:
        self._stack = stack
        self._problem = problem
        self._loss = loss
        self._at = at
        self._chunk = problem.chunk_size
        self._path: Path | None = None
        self._scratch = torch.empty(0)
        self.dtype = problem.gradients.dtype
        self.device = device
        target = problem.shared.gradient.to(device, torch.float64)
        length = target.norm(dim=1)
        # A power of two rounds nothing. It keeps the gradients of confident samples,
        # 1e-20 and less, inside the range of float32.
        scale = torch.exp2(length.clamp_min(1e-300).log2().round())
        self.scale = torch.where(length > 0, scale, torch.ones_like(scale))
        degree = problem.distance.degree
        self._unit = self.scale**degree  # of distances
        exact = torch.where(length > 0, length, self.scale)
        self._factor = self._unit / exact**degree if problem.relative else self._unit
        self._standard = (target / self.scale[:, None]).to(self.dtype)
        self._weight = (1 / self.scale).to(self.dtype)
        entry = problem.entry_weights(at)
        self._root = None if entry is None else entry**problem.distance.root
        self._prepared = self._standard
        self._seen: Tensor | None = None
        self._version = -1
        self._runs: dict[tuple[int, int], int | None] = {}
        self._expected: list[tuple[Tensor, Tensor]] = []

    @property
    def path(self) -> str:
        """The path in use, empty before the first evaluation."""
        return "" if self._path is None else self._path.name

    def evaluate(
        self,
        x: Float[Tensor, "attacks images ..."],
        y: Shaped[Tensor, "attacks images ..."],
        targets: Int[Tensor, " attacks"],
    ) -> Evaluation:
        """Distance of each attack, and its derivative in the images.

        Args:
            x: images, network-input units.
            y: labels; with ``soft_targets`` probabilities of the classes.
            targets: which shared gradient each attack is after.

        Returns:
            The values. NaN or infinite where the network is.
        """
        x = x.detach().to(self.device, self.dtype)
        if self._path is None:
            self._choose(x, y, targets)
        done: list[Evaluation] = []
        start = 0
        while start < len(x):
            pieces = -(-(len(x) - start) // self._chunk)
            stop = start + -(-(len(x) - start) // pieces)
            at = slice(start, stop)
            try:
                done.append(self._piece(self.chosen, x[at], y[at], targets[at]))
                start = stop
                continue
            except RuntimeError as error:
                if not out_of_memory(error) or stop - start == 1:
                    raise
            # Out of the handler, where the traceback no longer holds what filled it.
            self._chunk = max(1, (stop - start) // 2)
            release()
        return _joined(done)

    def gradient(
        self, x: Float[Tensor, "attacks images ..."], y: Shaped[Tensor, "attacks ..."]
    ) -> Float[Tensor, "attacks d_theta"]:
        """The gradients that these images would share, in the order of parameters.

        Args:
            x: images.
            y: labels.

        Returns:
            ``(attacks, d_θ)``, detached.
        """
        x = x.detach().to(self.device, self.dtype)
        if self._path is None:
            self._choose(x, y, torch.zeros(len(x), dtype=torch.long))
        path = self.chosen
        one = torch.ones(1, dtype=self.dtype, device=self.device)
        step = path.most or self._chunk
        pieces = [slice(i, i + step) for i in range(0, len(x), step)]
        rows = [path.graph(x[i], y[i], one.expand(len(x[i])), False) for i in pieces]
        return torch.cat([path.restore(row.flat) for row in rows])

    @substituting
    def classes(self, x: Float[Tensor, "*sample"]) -> int:
        """How many logits the network gives for one sample."""
        with torch.no_grad():
            count: list[int] = []

            def note(_: nn.Module, __: object, out: Tensor) -> None:
                count.append(out.shape[-1])

            handle = self._loss.module.register_forward_hook(note)
            try:
                target = torch.ones((), dtype=self.dtype, device=self.device)
                self._loss.sample(
                    self._at.shared, self._at.fixed, x.to(self.device), target[None]
                )
            finally:
                handle.remove()
        return count[-1]

    @property
    def chosen(self) -> Path:
        """The path in use."""
        if self._path is None:
            raise RuntimeError("no path is chosen before the first evaluation.")
        return self._path

    # -- one chunk -----------------------------------------------------------------

    def _piece(self, path: Path, x: Tensor, y: Tensor, targets: Tensor) -> Evaluation:
        if path.most is not None and len(x) > path.most:
            rows = [
                self._piece(path, x[i : i + 1], y[i : i + 1], targets[i : i + 1])
                for i in range(len(x))
            ]
            return _joined(rows)
        problem = self._problem
        if problem.soft_targets:
            y = y.detach().to(self.device, self.dtype).requires_grad_()
        else:
            y = y.detach().to(self.device)
        graph = path.graph(x, y, self._weight[targets], bool(self._expected))
        flat = graph.flat
        if self._scratch.shape != flat.shape or self._scratch.dtype != flat.dtype:
            self._scratch = torch.empty_like(flat)
        root = self._root
        if root is not None:
            flat.mul_(root)
        value, cotangent = problem.distance.compare(
            flat, self._rows(targets), self._scratch
        )
        if root is not None:
            cotangent.mul_(root)
        scale = self._factor[targets].to(self.dtype)
        objective = value * scale
        value = value * self._unit[targets].to(self.dtype)
        extra = None
        if self._expected:
            expected = [
                (_of(mean, targets), _of(variance, targets))
                for mean, variance in self._expected
            ]
            term = batch_norm_distance(graph.features, expected, problem.first_layer)
            objective = objective + problem.batch_norm * term.detach()
            cotangent.mul_(scale[:, None])
            extra = term, torch.full_like(term, problem.batch_norm)
        pulled = graph.pull(cotangent, extra)
        gradient, target_gradient = pulled.images, pulled.targets
        if not self._expected and problem.distance.degree:
            gradient = gradient * scale.view(-1, *[1] * (x.ndim - 1))
            if target_gradient is not None:
                target_gradient = target_gradient * scale[:, None, None]
        return Evaluation(value, objective, gradient, target_gradient)

    def _rows(self, targets: Tensor) -> Tensor:
        first, n = self._run(targets), len(targets)
        # No copy of these large tensors where one can look at them in place.
        if first is not None:
            return self._prepared[first : first + n]
        return self._prepared[targets]

    def _run(self, targets: Tensor) -> int | None:
        """The first of consecutive positions; ``None`` where they are not.

        What is known of the same tensor is not looked at again, at every step.
        """
        base = targets if targets._base is None else targets._base
        if base is not self._seen or base._version != self._version:
            self._seen, self._version, self._runs = base, base._version, {}
        n = len(targets)
        place = int(targets.storage_offset()), n
        if place not in self._runs:
            first = int(targets[0])
            ordered = torch.arange(first, first + n, device=targets.device)
            self._runs[place] = first if torch.equal(targets, ordered) else None
        return self._runs[place]

    def _use(self, path: Path) -> None:
        self._path = path
        target = path.arrange(self._standard)
        if self._root is not None:
            self._root = path.arrange(self._root[None])[0]
            target = target * self._root
        self._prepared = self._problem.distance.prepare(target)

    # -- the first evaluation --------------------------------------------------------

    def _choose(self, x: Tensor, y: Tensor, targets: Tensor) -> None:
        if self._problem.batch_norm:
            self._expected = self._statistics(x[0, 0], y[0, 0])
        n = min(len(x), self._chunk)
        x, y, targets = x[:n], y[:n], targets[:n]
        root = self._root

        def cost(path: Path) -> None:
            self._root = root
            self._use(path)
            while True:
                n = min(len(x), self._chunk)
                try:
                    self._piece(path, x[:n], y[:n], targets[:n])
                    return
                except RuntimeError as error:
                    if not out_of_memory(error) or n == 1:
                        raise
                # Out of the handler, where the traceback no longer holds what fills it.
                self._chunk = n // 2
                release()

        problem = self._problem
        before = _CHOICES.setdefault(problem.gradients, {})
        situation = problem.path_name, x.shape, problem.soft_targets
        common = self._loss, self._at, problem.path_name, x
        path = None
        if situation in before:
            path = built(*common, before[situation])
        if path is None:
            path = choose(*common, y, cost)
        before[situation] = path.name
        self._root = root
        if not isinstance(path, VmapPath):  # whose weights are not to be left behind
            # Checkpointed parts of a forward run again during the backward pass.
            self._stack.enter_context(self._loss.holding())
        if isinstance(path, LayerwisePath):
            path.settle(x[0], y[0].detach().to(self.device))
        self._use(path)
        name = type(problem.gradients.module).__name__
        _log.debug("attacks on %s take the path %s", name, path.name)

    @substituting
    def _statistics(self, x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Mean and variance that each BatchNorm layer should see, by order of call."""
        with watched_norms(self._loss, modules=True) as seen, torch.no_grad():
            self._loss.sample(self._at.shared, self._at.fixed, x, y.to(x.device))
        if not seen:
            raise ValueError(
                f"the BatchNorm prior needs BatchNorm layers with running statistics, "
                f"but {type(self._problem.gradients.module).__name__} uses none; use "
                f"batch_norm=0."
            )
        granted = self._problem.statistics
        if granted is None:
            pairs = [(m.running_mean, m.running_var) for m in seen]
        else:
            pairs = list(granted)
        if len(pairs) != len(seen):
            raise ValueError(
                f"statistics must have one (mean, variance) for each of the "
                f"{len(seen)} BatchNorm layers of the forward, got {len(pairs)}."
            )
        return [(m.detach().to(x), v.detach().to(x)) for m, v in pairs]


def _of(statistic: Tensor, targets: Tensor) -> Tensor:
    return statistic[targets] if statistic.ndim == 2 else statistic


def _joined(parts: list[Evaluation]) -> Evaluation:
    if len(parts) == 1:
        return parts[0]
    soft = [p.target_gradient for p in parts if p.target_gradient is not None]
    return Evaluation(
        torch.cat([p.distance for p in parts]),
        torch.cat([p.objective for p in parts]),
        torch.cat([p.gradient for p in parts]),
        torch.cat(soft) if soft else None,
    )
