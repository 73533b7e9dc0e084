"""Gradient matching for many attacks at once: the objective and its derivative."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from leakwatch.attacks.matching import distances
from leakwatch.attacks.matching.distances import Distance
from leakwatch.attacks.matching.matcher import Evaluation, Matcher
from leakwatch.attacks.matching.priors import BatchStatistics
from leakwatch.attacks.matching.selection import PathName
from leakwatch.attacks.shared_gradient import SharedGradient
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.losses import classification_criterion
from leakwatch.derivatives.runtime import Weights, evaluating

__all__ = ["Evaluation", "Matcher", "MatchingProblem", "PathName", "soft_criterion"]

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
        given = self._layer_weights
        if given is None:
            return None
        names = [name.removeprefix("module.") for name in at.shared]
        if isinstance(given, Mapping):
            unknown = given.keys() - set(names)
            if unknown:
                raise ValueError(
                    f"layer_weights name {', '.join(sorted(unknown))}, but the shared "
                    f"parameters are {', '.join(names)}."
                )
            numbers = [float(given.get(name, 1.0)) for name in names]
        else:
            numbers = [float(n) for n in given]
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
