"""The last linear layer of a classifier, where its gradient spells the labels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from leakwatch.attacks.shared_gradient import SharedGradient
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.losses import is_cross_entropy
from leakwatch.derivatives.runtime import UnsupportedModuleError

__all__ = ["Head", "HeadGradient", "find_head", "logit_slopes"]

_GUESSES: Final = 256
_CHUNK: Final = 64
_NOT_NEGATIVE: Final = -1e-6
_TINY: Final = 1e-12


@final
@dataclass(frozen=True, eq=False)
class HeadGradient:
    """What one target's gradient says about the last layer, float64.

    Attributes:
        weight: ∂loss/∂weight = mean over samples of (p − e_y) aᵀ, with softmax p, label
            y and features a.
        bias: ∂loss/∂bias = mean of p − e_y; without a bias estimated from ``weight``
            and the mean sum of features of guesses.
    """

    weight: Float[Tensor, "classes features"]
    bias: Float[Tensor, " classes"]

    @property
    def noise(self) -> float:
        """Standard deviation of what was added to each entry, as the gradient tells.

        p and e_y both add up to 1, so an undisturbed gradient adds up to 0 over
        classes, feature by feature.
        """
        sums = self.weight.sum(0)
        return float(sums.square().mean().sqrt()) / math.sqrt(len(self.weight))


@final
@dataclass(frozen=True, eq=False)
class Head:
    """The layer whose output is the logits, and how it answers to guessed inputs.

    Attributes:
        name: of the layer.
        weight: float64.
        bias: float64, zeros when there is none.
        has_bias: whether a bias is shared.
        softmax: mean softmax of the guesses.
        softmax_std: its standard deviation over guesses, of the class where it is
            largest: 0 where the network answers to all inputs alike.
        feature_sum: mean over guesses of the sum of features.
        nonnegative: whether no feature of a guess was negative, as behind ReLU or
            sigmoid.
    """

    name: str
    weight: Float[Tensor, "classes features"]
    bias: Float[Tensor, " classes"]
    has_bias: bool
    softmax: Float[Tensor, " classes"]
    softmax_std: float
    feature_sum: float
    nonnegative: bool
    _weight_at: int
    _bias_at: int | None

    @property
    def classes(self) -> int:
        """How many logits there are."""
        return len(self.weight)

    def read(self, gradient: Float[Tensor, " d_theta"]) -> HeadGradient:
        """The layer's part of one flat gradient."""
        end = self._weight_at + self.weight.numel()
        weight = gradient[self._weight_at : end].double().view(self.weight.shape)
        if self._bias_at is not None:
            at = self._bias_at
            return HeadGradient(weight, gradient[at : at + self.classes].double())
        scale = self.feature_sum if abs(self.feature_sum) > _TINY else 1.0
        return HeadGradient(weight, weight.sum(1) / scale)


def find_head(
    gradients: GradientMap,
    sample_shape: tuple[int, ...],
    *,
    auxiliary: Float[Tensor, "n ..."] | None = None,
    seed: int = 0,
) -> Head:
    """Runs the network on guesses and finds the layer that makes the logits.

    Args:
        gradients: the map whose gradients are shared.
        sample_shape: shape of one input.
        auxiliary: inputs of the attacker's own, as much like the private ones as
            possible; ``None``: 256 draws of N(0, 1), like Dimitrov et al. 2022.
        seed: of those draws.

    Returns:
        The layer.

    Raises:
        UnsupportedModuleError: if no ``nn.Linear`` makes the logits, or its weight is
            frozen or used elsewhere in the network too, so that its gradient isn't
            that of the logits alone.
    """
    device = next(gradients.module.parameters()).device
    if auxiliary is None:
        generator = torch.Generator().manual_seed(seed)
        auxiliary = torch.randn(_GUESSES, *sample_shape, generator=generator)
    guesses = auxiliary.detach().to(device)
    with gradients.evaluation(guesses) as at, torch.no_grad():
        name, layer, features, logits = _run(gradients, guesses)
        places, start = {}, 0
        for key, p in at.shared.items():
            places[key] = start
            start += p.numel()
        weight_name, bias_name = f"{name}.weight", f"{name}.bias"
        if weight_name not in places:
            raise UnsupportedModuleError(
                f"labels are read from the gradient of {_short(name)}, whose weight is "
                f"frozen or shared under another name; pass the labels."
            )
        if _uses(gradients, layer.weight) > 1:
            raise UnsupportedModuleError(
                f"the weight of {_short(name)} is used in another layer too, so its "
                f"gradient doesn't show the labels alone; pass the labels."
            )
        weight = at.shared[weight_name].double().cpu()
        both = {**at.shared, **at.fixed}
        bias = both[bias_name].double().cpu() if bias_name in both else None
    features, logits = features.double().cpu(), logits.double().cpu()
    return Head(
        name=_short(name),
        weight=weight,
        bias=weight.new_zeros(len(weight)) if bias is None else bias,
        has_bias=bias_name in places,
        softmax=logits.softmax(1).mean(0),
        softmax_std=float(logits.softmax(1).std(0, correction=0).max()),
        feature_sum=float(features.sum(1).mean()),
        nonnegative=bool(features.min() >= _NOT_NEGATIVE),
        _weight_at=places[weight_name],
        _bias_at=places.get(bias_name),
    )


def logit_slopes(
    gradients: GradientMap, shared: SharedGradient, labels: Int[Tensor, " targets"]
) -> Float[Tensor, "targets classes"] | None:
    """δ* = softmax(z) − e_y at the private image of each target.

    The gradient of the bias that is added to make the logits. Other losses than
    cross-entropy, and networks that don't end in a linear layer with a bias, don't
    show it.

    Args:
        gradients: the map.
        shared: what it shared, one image in each target.
        labels: of the images.

    Returns:
        The slopes, float64; ``None`` where they can't be read.
    """
    if not is_cross_entropy(gradients.criterion):
        return None
    try:
        head = find_head(gradients, shared.sample_shape)
    except UnsupportedModuleError:
        return None
    if not head.has_bias:
        return None
    return torch.stack([head.read(g).bias for g in shared.gradient])


def _run(
    gradients: GradientMap, guesses: Tensor
) -> tuple[str, nn.Linear, Tensor, Tensor]:
    dtype = next(gradients.module.parameters()).dtype
    features, logits = [], []
    heads: dict[str, nn.Linear] = {}
    for part in torch.split(guesses.to(dtype), _CHUNK):
        with _recorded(gradients) as seen:
            prepare = gradients.prepare or (lambda x: x)
            out: object = gradients.module(prepare(part))
        made = [
            (name, layer, inputs)
            for name, layer, inputs, output in seen
            if isinstance(out, Tensor)
            and inputs.ndim == 2
            and output.shape == out.shape
            and torch.equal(output, out)
        ]
        if not made or not isinstance(out, Tensor):
            raise UnsupportedModuleError(
                f"labels can only be inferred when the logits are the output of an "
                f"nn.Linear layer; in {type(gradients.module).__name__} none of them "
                f"makes the output. Pass the labels, or a module whose forward ends in "
                f"one (no softmax after it)."
            )
        name, layer, inputs = made[-1]
        heads[name] = layer
        features.append(inputs)
        logits.append(out)
    name, layer = next(iter(heads.items()))
    return name, layer, torch.cat(features), torch.cat(logits)


@contextmanager
def _recorded(
    gradients: GradientMap,
) -> Iterator[list[tuple[str, nn.Linear, Tensor, Tensor]]]:
    seen: list[tuple[str, nn.Linear, Tensor, Tensor]] = []
    handles = []
    for name, module in gradients.named_modules():
        if isinstance(module, nn.Linear):

            def note(
                layer: nn.Module, inputs: tuple[Tensor, ...], out: Tensor, n: str = name
            ) -> None:
                assert isinstance(layer, nn.Linear)
                seen.append((n, layer, inputs[0].detach(), out.detach()))

            handles.append(module.register_forward_hook(note))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _uses(gradients: GradientMap, weight: Tensor) -> int:
    return sum(
        any(p is weight for p in m.parameters(recurse=False))
        for _, m in gradients.named_modules()
    )


def _short(name: str) -> str:
    return name.removeprefix("module.")
