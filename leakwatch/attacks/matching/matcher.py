"""Evaluates a matching problem: chunks, scales, and the path that is fastest."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, final
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from leakwatch.attacks.matching.engines import Path, VmapPath, watched_norms
from leakwatch.attacks.matching.layerwise import LayerwisePath
from leakwatch.attacks.matching.priors import batch_norm_distance
from leakwatch.attacks.matching.selection import built, choose
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.runtime import SampleLoss, Weights
from leakwatch.derivatives.runtime.chunking import out_of_memory
from leakwatch.derivatives.safe_ops.substitutes import substituting

if TYPE_CHECKING:
    from leakwatch.attacks.matching.objective import MatchingProblem

__all__ = ["Evaluation", "Matcher"]

_log = logging.getLogger(__name__)

# The paths chosen for networks so far: finding one takes about ten evaluations.
_CHOICES: WeakKeyDictionary[GradientMap, dict[object, str]] = WeakKeyDictionary()


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
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
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
        first, n = int(targets[0]), len(targets)
        ordered = torch.arange(first, first + n, device=targets.device)
        # No copy of these large tensors where one can look at them in place.
        if torch.equal(targets, ordered):
            return self._prepared[first : first + n]
        return self._prepared[targets]

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
            self._piece(path, x, y, targets)

        problem = self._problem
        before = _CHOICES.setdefault(problem.gradients, {})
        situation = problem.path_name, x.shape, problem.soft_targets
        common = self._loss, self._at, problem.path_name, x
        found = None
        if situation in before:
            found = built(*common, before[situation])
        if found is None:
            found = choose(*common, y, cost)
        before[situation] = found.name
        self._root = root
        if not isinstance(found, VmapPath):  # whose weights are not to be left behind
            # Checkpointed parts of a forward run again during the backward pass.
            self._stack.enter_context(self._loss.holding())
        if isinstance(found, LayerwisePath):
            found.settle(x[0], y[0].detach().to(self.device))
        self._use(found)
        name = type(problem.gradients.module).__name__
        _log.debug("attacks on %s take the path %s", name, found.name)

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
