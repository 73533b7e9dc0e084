"""What a simulation of the local steps makes small."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakwatch.attacks.matching import distances
from leakwatch.attacks.matching.update_engines import UpdatePath
from leakwatch.attacks.matching.update_selection import PathFor
from leakwatch.attacks.pixels import PixelScale
from leakwatch.attacks.updates.descent import Values
from leakwatch.attacks.updates.local_steps import LocalSteps
from leakwatch.attacks.updates.priors import excess, order_distance, squared_variation
from leakwatch.attacks.updates.simulation_cost import SimulationCost
from leakwatch.derivatives import GradientMap
from leakwatch.weight_update import WeightUpdate

if TYPE_CHECKING:
    from leakwatch.attacks.updates.simulation import SimulationAttack

__all__ = ["SimulationObjective", "layer_weights"]


@final
class SimulationObjective:
    """The objective of a :class:`SimulationAttack`.

    Its values are divided by f_t, so that steps at different f_t can be compared; its
    gradients are not.

    Args:
        attack: the settings.
        gradients: gives precision and the order of weights.
        update: what the clients shared, with the local training.
        labels: of all clients, in the order of the guessed images.
        path_for: finds the path.
        pixels: range of the images.
        cost: says how much is done at once.
    """

    def __init__(
        self,
        attack: SimulationAttack,
        gradients: GradientMap,
        update: WeightUpdate,
        labels: Int[Tensor, "clients N"],
        path_for: PathFor,
        pixels: PixelScale,
        cost: SimulationCost,
    ) -> None:
        if update.training is None:
            raise ValueError("a simulation needs the local training.")
        dtype, device = gradients.dtype, labels.device
        self._attack = attack
        self._training = update.training
        self._samples = update.samples
        self._sets = attack.sets(update.training, update.samples)
        self._initial = update.initial.to(device, dtype)
        self._difference = update.difference.to(device, dtype)
        self._labels = labels
        self._path_for = path_for
        self._path: UpdatePath | None = None
        self._pixels = pixels
        self._cost = cost
        self._distance = distances.get("cosine")
        self._prepared = self._distance.prepare(self._difference)
        groups = -(-self._sets * update.samples // update.training.batch_size)
        scale = 1 / (groups * update.training.lr**2)
        self._weight = layer_weights(gradients.sizes()).to(device, dtype) * scale

    def __call__(
        self,
        x: Float[Tensor, "attacks images ..."],
        alpha: Float[Tensor, " attacks"],
        clients: Int[Tensor, " attacks"],
        step: int,
    ) -> Values:
        """See :class:`leakwatch.attacks.updates.descent.Objective`."""
        f = self._attack.fit_weight(step)
        pieces = -(-len(x) // self._cost.chunk)
        done = [
            self._piece(*part)
            for part in zip(x.chunk(pieces), clients.chunk(pieces), strict=True)
        ]
        distance, fit, gradient = (
            parts[0] if len(parts) == 1 else torch.cat(parts)
            for parts in zip(*done, strict=True)
        )
        value, slope = self._priors(x)
        return Values(distance, fit + value / f, gradient.mul_(f).add_(slope), None)

    def _piece(self, x: Tensor, clients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Distance, fit and its derivative for some attacks."""
        w = self._initial.expand(len(x), -1)
        y = self._labels[clients]
        if self._path is None:
            first = min(self._training.batch_size, self._samples)
            self._path = self._path_for(w, x[:, :first], y[:, :first])
        steps = LocalSteps(
            self._path, self._training, self._samples, self._sets, self._cost.segment
        )
        simulated = steps(w, x, y)
        moved = w - simulated.final
        apart = self._difference[clients] - moved
        cotangent = apart * self._weight
        fit = torch.linalg.vecdot(apart, cotangent)
        gradient = simulated.pull(cotangent.mul_(2))
        distance, _ = self._distance.compare(
            moved, self._prepared[clients], torch.empty_like(moved)
        )
        return distance, fit, gradient

    def _priors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Their weighted sum for each attack, and its derivative."""
        attack = self._attack
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            total = leaf.flatten(1).sum(1) * 0
            if attack.tv:
                total = total + attack.tv * squared_variation(leaf)
            if attack.clip:
                total = total + attack.clip * excess(leaf, self._pixels)
            if attack.order:
                kind = attack.order_prior
                total = total + attack.order * order_distance(leaf, self._sets, kind)
            (slope,) = torch.autograd.grad(total.sum(), leaf)
        return total.detach(), slope


def layer_weights(sizes: Mapping[str, int]) -> Float[Tensor, " d_theta"]:
    """e^−l for every entry, l counting the layers from the input.

    Args:
        sizes: of the parameters by name, in order; those of one module are a layer.

    Returns:
        ``(d_θ,)``, float64.

    Example:
        >>> layer_weights({"0.weight": 1, "0.bias": 1, "2.weight": 1}).tolist()
        [1.0, 1.0, 0.36787944117144233]
    """
    layers = {name.rpartition(".")[0]: None for name in sizes}
    place = {layer: float(i) for i, layer in enumerate(layers)}
    numbers = [
        torch.full((size,), -place[name.rpartition(".")[0]], dtype=torch.float64)
        for name, size in sizes.items()
    ]
    return torch.cat(numbers).exp()
