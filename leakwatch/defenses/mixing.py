"""Mixed samples: partners, coefficients, and what an attacker can undo of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from leakwatch.checks import check_integer, check_number
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.losses import classification_criterion, cross_entropy
from leakwatch.derivatives.runtime import Criterion

__all__ = ["Mixing", "estimate"]

_SMALLEST: Final = 1e-30


@final
@dataclass(frozen=True, eq=False)
class Mixing:
    """x' = αx + (1 − α)x_p for each sample, with the loss mixed the same way.

    The loss at x' is α ℓ(x', y) + (1 − α) ℓ(x', y_p), which for cross-entropy is the
    loss under the mixed label (Zhang et al., "mixup", ICLR 2018).

    Attributes:
        x: private samples, network inputs.
        y: their labels.
        partner: x_p.
        partner_labels: y_p.
        coefficient: α, the share of the private sample, ``(n,)``, float64.
        mix_labels: whether the loss is mixed, or that under y alone.
    """

    x: Float[Tensor, "n ..."]
    y: Shaped[Tensor, "n ..."]
    partner: Float[Tensor, "n ..."]
    partner_labels: Shaped[Tensor, "n ..."]
    coefficient: Float[Tensor, " n"]
    mix_labels: bool = True

    @property
    def mixed(self) -> Float[Tensor, "n ..."]:
        """x', float64."""
        alpha = self._alpha(self.x)
        return alpha * self.x.double() + (1 - alpha) * self.partner.double()

    @property
    def shift(self) -> Float[Tensor, "n d_x"]:
        """δ_x = x' − x, flattened."""
        return (self.mixed - self.x.double()).flatten(1)

    def select(self, row: int) -> Mixing:
        """One of them.

        Args:
            row: which.
        """
        one = slice(row, row + 1)
        return replace(
            self,
            x=self.x[one],
            y=self.y[one],
            partner=self.partner[one],
            partner_labels=self.partner_labels[one],
            coefficient=self.coefficient[one],
        )

    def gradient(self, gradients: GradientMap) -> Float[Tensor, "n d_theta"]:
        """The gradient at x' of the (mixed) loss.

        Args:
            gradients: the map.
        """
        return self._mix(lambda y: gradients(self.mixed, y))

    def gradient_map(self, gradients: GradientMap, row: int) -> GradientMap:
        """The map that an attacker matches who knows α and both labels.

        (x, y) ↦ α g(x, y) + (1 − α) g(x, y_p), which at x' and the private label is the
        message of that row exactly, where g(x', y) alone is another gradient. The last
        layer's gradient shows α and both labels as it shows one: it is softmax(z) less
        the mixed label.

        Args:
            gradients: the map.
            row: which of the samples.

        Raises:
            IndexError: if there is no such sample.
            ValueError: for a criterion with parameters of its own.

        Example:
            >>> import torch
            >>> at = GradientMap(torch.nn.Linear(3, 2), dtype=torch.float64)
            >>> x, y = torch.rand(2, 3), torch.tensor([0, 1])
            >>> mixing = Mixing(x, y, x.flip(0), y.flip(0), torch.tensor([0.6, 0.9]))
            >>> at_mixture = mixing.gradient_map(at, 1)(mixing.mixed[1:], y[1:])
            >>> torch.testing.assert_close(at_mixture, mixing.gradient(at)[1:])
        """
        if not 0 <= row < len(self.x):
            raise IndexError(
                f"row {row} of {len(self.x)} mixtures; give a position from 0."
            )
        if not self.mix_labels:
            return gradients
        own = gradients.criterion
        if isinstance(own, nn.Module) and any(True for _ in own.parameters()):
            raise ValueError(
                "the criterion has parameters of its own, and a mixture of its losses "
                "can't be matched; use a function of module, x and y."
            )
        alpha = float(self.coefficient[row])
        return gradients.with_criterion(
            _MixedLoss(own, alpha, self.partner_labels[row])
        )

    def influence(self, gradients: GradientMap) -> Float[Tensor, "n d_theta"]:
        r"""J_δ δ_x, with J_δ the Jacobian at x' = x + δ_x.

        The score of a perturbed sample is ‖(H + εI)⁻¹ Jᵀ J_δ δ_x‖ (Zhang et al.,
        "Inversion Influence Functions", NeurIPS 2023, Section 3.3, with the damping of
        Section 4; their J is our Jᵀ), so it is ``i2f`` for this perturbation:
        ``leakwatch.score(module, x, y, ["i2f"], delta=influence, epsilon=ε)``.

        The loss that J_δ derives from is the one that is shared. Beside J_δ δ_x a mixed
        label also moves the gradient at x itself; ``Shared.delta`` holds all of it and
        is a δ for ``i2f`` as well.

        Args:
            gradients: the map.
        """
        return self._mix(lambda y: gradients.jvp(self.mixed, y, self.shift))

    def unmixed(self, mixtures: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """What an attacker who knows partner and α makes of a reconstruction of x'.

        (x̂' − (1 − α)x_p)/α: an error of x̂' becomes 1/α times as large, and nothing else
        protects the sample from him. Public partners, or repeated ones, are known.

        Args:
            mixtures: reconstructions of the mixed samples, network inputs.
        """
        alpha = self._alpha(mixtures)
        return (mixtures - (1 - alpha) * self.partner.to(mixtures)) / alpha

    def estimation_error(
        self, prior_std: float, queries: int = 1
    ) -> Float[Tensor, " n"]:
        """Mean squared error of a pixel that :func:`estimate` leaves.

        R²/(1 + K α²/(1 − α)²) in expectation over samples and partners of variance R² a
        pixel, drawn alike, from K mixtures with partners of their own.

        Args:
            prior_std: R, root mean square over pixels of their standard deviation.
            queries: K.

        Example:
            >>> import torch
            >>> x, y = torch.zeros(1, 4), torch.tensor([0])
            >>> half = Mixing(x, y, x, y, torch.tensor([0.5]).double())
            >>> [round(float(half.estimation_error(0.2, k)), 9) for k in (1, 3)]
            [0.02, 0.01]
        """
        r, k = (
            check_number("prior_std", prior_std, example=0.25),
            check_integer("queries", queries),
        )
        rest = (1 - self.coefficient).square()
        return r**2 * rest / (rest + k * self.coefficient.square())

    def _alpha(self, like: Tensor) -> Tensor:
        alpha = self.coefficient.view(-1, *[1] * (like.ndim - 1))
        return alpha.to(like.device)

    def _mix(self, of: Callable[[Tensor], Tensor]) -> Tensor:
        own = of(self.y)
        if not self.mix_labels:
            return own
        alpha = self.coefficient.to(own)[:, None]
        return alpha * own + (1 - alpha) * of(self.partner_labels)


@final
@dataclass(frozen=True, eq=False)
class _MixedLoss:
    """α ℓ(x, y) + (1 − α) ℓ(x, y_p) for any y, with y_p held fixed."""

    criterion: Criterion
    alpha: float
    partner_label: Shaped[Tensor, "..."]

    def __call__(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        other = self.partner_label.to(y).expand_as(y)
        if self.criterion is classification_criterion:
            # One forward for both.
            logits = module(x)
            own, theirs = cross_entropy(logits, y), cross_entropy(logits, other)
        else:
            own, theirs = (self.criterion(module, x, of) for of in (y, other))
        return self.alpha * own + (1 - self.alpha) * theirs


def estimate(
    mixings: Sequence[Mixing],
    mixtures: Sequence[Float[Tensor, "n ..."]],
    mean: Float[Tensor, "..."],
) -> Float[Tensor, "n ..."]:
    """The samples, from mixtures with different unknown partners.

    The linear estimate of least mean squared error where samples and partners are drawn
    alike, with mean μ: with p_k = α_k²/(1 − α_k)²,

        x̂ = μ + Σ_k p_k (x'_k − μ)/α_k / (1 + Σ_k p_k).

    The variance of pixels drops out of it. See :meth:`Mixing.estimation_error`.

    Args:
        mixings: of which only the coefficients are used, one for each mixture.
        mixtures: the mixtures, or reconstructions of them, network inputs.
        mean: μ, network inputs, the shape of one sample.

    Raises:
        ValueError: for no mixtures, another number of them than of mixings, or other
            shapes.

    Example:
        >>> import torch
        >>> x, y = torch.ones(1, 4), torch.tensor([0])
        >>> one = Mixing(x, y, torch.zeros(1, 4), y, torch.tensor([0.75]))
        >>> estimate([one], [one.mixed], torch.zeros(4)).tolist()
        [[0.9, 0.9, 0.9, 0.9]]
    """
    if not mixings or len(mixings) != len(mixtures):
        raise ValueError(
            f"estimate needs each mixture's coefficients, at least one; got "
            f"{len(mixings)} mixings and {len(mixtures)} mixtures."
        )
    for image in mixtures:
        if image.shape != mixtures[0].shape or image.shape[1:] != mean.shape:
            raise ValueError(
                f"mixtures must have one shape, (n, *sample), and mean that of a "
                f"sample; got {[tuple(t.shape) for t in mixtures]} and "
                f"{tuple(mean.shape)}."
            )
    mean = mean.to(mixtures[0].device, torch.float64)
    total = torch.zeros_like(mixtures[0], dtype=torch.float64)
    weights = torch.ones_like(total)
    for mixing, image in zip(mixings, mixtures, strict=True):
        alpha = mixing._alpha(image).double()
        # Nothing is mixed in at α = 1: that image counts alone.
        precision = alpha.square() / (1 - alpha).square().clamp_min(_SMALLEST)
        total += precision / alpha * (image.double() - mean)
        weights += precision
    return (mean + total / weights).to(mixtures[0].dtype)
