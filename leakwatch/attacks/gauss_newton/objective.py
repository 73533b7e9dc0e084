r"""What a Gauss–Newton attack makes small, and its derivatives, for many images.

.. math:: \varphi(x) = \tfrac12 \frac{\|g(x) - \tilde g\|^2}{\|\tilde g\|^2}
    + \tfrac12 \rho^2 \|x - \mu\|^2, \qquad
    \rho = \frac{s}{R\,\|\tilde g\|}

with x in pixels. Up to a constant this is the negative log-posterior of an image with
prior N(μ, R²) per pixel whose gradient was shared with noise N(0, s²); s = 0 leaves the
plain distance. With a full prior covariance C the last term is
½ (s/‖g̃‖)² (x − μ)ᵀC⁻¹(x − μ).
"""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from leakwatch.attacks.gauss_newton.smoothed_relu import SmoothedKinks
from leakwatch.attacks.pixels import PixelScale
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.gram.gram import Workspace, gram
from leakwatch.derivatives.runtime import Criterion
from leakwatch.priors import GaussianPrior

_SMALLEST_FAST = 1e-25

__all__ = ["PosteriorObjective", "fixed_logit_gradient"]


def fixed_logit_gradient(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    r"""A loss that is linear in the logits, with the slopes that y states.

    The gradient of cross-entropy is :math:`\sum_k \delta_k \nabla_\theta z_k(x)` with
    logits z and δ = softmax(z) − e_y. The last bias' gradient *is* δ at the private
    image, so an attacker can match :math:`\sum_k \delta^*_k \nabla_\theta z_k(x)`:
    equal at the private image, and without the exponentials that make a confident
    network's gradient vary over orders of magnitude from image to image.

    Args:
        module: gives logits ``(batch, classes)``.
        x: network inputs.
        y: δ*, ``(batch, classes)``.

    Returns:
        δ*·z of each sample.
    """
    logits: Tensor = module(x)
    return (logits * y.to(logits)).sum(1)


@final
class _Kinks:
    """Whether any were met: survives an evaluation, which puts attributes back."""

    met = False


@final
class _Smoothed(nn.Module):
    """A criterion with smoothed kinks, whose width comes with the label.

    Under ``vmap`` each attack then has a width of its own: y holds label entries and,
    last, τ. A module, since the criterion's own parameters are shared too.
    """

    def __init__(self, criterion: Criterion, like: Tensor) -> None:
        super().__init__()
        self.criterion = criterion
        self.shape, self.kind = like.shape, like.dtype
        self.kinks = _Kinks()

    def forward(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        width = y[0, -1]
        labels = y[:, :-1].reshape(len(y), *self.shape)
        # Classes and bits were packed with the width; numbers are of the arithmetic.
        labels = labels.to(x.dtype if self.kind.is_floating_point else self.kind)
        with SmoothedKinks(width) as mode:
            out = self.criterion(module, x, labels)
        self.kinks.met |= mode.met
        return out


@final
class PosteriorObjective:
    """φ and its derivatives for attacks in rows, each with a target of its own.

    All arguments and results are in pixel units, float64; ``rows`` are positions of
    attacks, and every other tensor has one entry for each of them.

    Args:
        gradients: the map whose gradients were shared.
        target: g̃, ``(attacks, d_θ)``.
        labels: ``(attacks, images, ...)``.
        sample_shape: shape of one sample.
        pixels: their scale.
        criterion: instead of the map's, for labels of another kind.
        images: samples averaged in each gradient.
        noise_std: s; 0 for no prior.
        prior_std: R, pixels.
        prior_mean: μ, pixels, the shape of a sample.
        prior: instead of both.
        fast: whether products with J are taken in float32.

    Attributes:
        size: unknowns of one attack.
        weight: ρ², ``(attacks,)``; with a full covariance (s/‖g̃‖)².
        noise: expected norm of the noise relative to ‖g̃‖, ``(attacks,)``.
        kinked: whether the network has kinks that are smoothed; known after the first
            value.
    """

    def __init__(
        self,
        gradients: GradientMap,
        target: Float[Tensor, "attacks d_theta"],
        labels: Tensor,
        *,
        sample_shape: tuple[int, ...],
        pixels: PixelScale,
        criterion: Criterion | None = None,
        images: int = 1,
        noise_std: float = 0.0,
        prior_std: float = 1.0,
        prior_mean: Tensor | None = None,
        prior: GaussianPrior | None = None,
        fast: bool = False,
    ) -> None:
        self._criterion = _Smoothed(criterion or gradients.criterion, labels[0, 0])
        self._map = gradients.with_criterion(self._criterion, torch.float64)
        self._products = self._map
        target = target.to(torch.float64)
        lengths = target.norm(dim=1)
        # Beyond this a confident sample's gradient leaves the range of float32.
        if fast and bool(((lengths == 0) | (lengths > _SMALLEST_FAST)).all()):
            self._products = gradients.with_criterion(self._criterion, torch.float32)
        self._workspace = Workspace()
        self.images, self.sample_shape, self.pixels = images, sample_shape, pixels
        device = next(gradients.module.parameters()).device
        target = target.to(device)
        self.scale = target.norm(dim=1)
        self.scale = torch.where(self.scale > 0, self.scale, 1.0)
        self._unit = target / self.scale[:, None]
        # One row for each sample: its label entries.
        self._labels = labels.to(device, torch.float64).reshape(
            len(target) * images, -1
        )
        self.size = images * int(torch.Size(sample_shape).numel())
        shape = torch.ones(images, *sample_shape, dtype=torch.float64, device=device)
        self.input_scale = (shape / pixels.input_std(shape)).reshape(-1)
        self.prior = prior
        if prior is not None:
            prior_std, prior_mean = 1.0, prior.mean
        self.weight = (noise_std / (prior_std * self.scale)) ** 2
        self.noise = noise_std * target.shape[1] ** 0.5 / self.scale
        centre = torch.zeros_like(shape)
        if prior_mean is not None:
            centre = prior_mean.to(shape).expand_as(shape)
        self.centre = centre.reshape(-1)

    @property
    def kinked(self) -> bool:
        """Whether a ReLU was met."""
        return self._criterion.kinks.met

    def to_input(self, p: Float[Tensor, "rows n"]) -> Float[Tensor, "rows images ..."]:
        """Network inputs of pixels."""
        x = p.view(len(p), self.images, *self.sample_shape)
        return self.pixels.to_input(x)

    def residual(
        self, rows: Int[Tensor, " rows"], p: Float[Tensor, "rows n"]
    ) -> Float[Tensor, "rows d_theta"]:
        """(g(x) − g̃)/‖g̃‖."""
        x, y, w = self._samples(rows, p, torch.zeros_like(self.scale[rows]))
        if self._products.path == "auto":
            # The map is examined at its first call: not with smoothed kinks, whose
            # derivative is on purpose not that of the gradient.
            self._products(x[:2], y[:2], w[:2])
        g = self._map(x, y, w).view(len(rows), self.images, -1).sum(1)
        apart: Tensor = g - self._unit[rows]
        return apart

    def value(
        self, rows: Int[Tensor, " rows"], p: Tensor, residual: Tensor
    ) -> Float[Tensor, " rows"]:
        """φ at p, from its residual."""
        apart = p - self.centre
        prior = self.weight[rows] * (apart * self.stiffness(apart)).sum(1)
        phi: Tensor = 0.5 * (residual.square().sum(1) + prior)
        return phi

    def slope(
        self, rows: Int[Tensor, " rows"], p: Tensor, residual: Tensor, width: Tensor
    ) -> Float[Tensor, "rows n"]:
        """∇φ, with kinks smoothed."""
        pull = self._pull(self._map, rows, p, residual, width)
        slope: Tensor = pull + self.pulled_back(rows, p)
        return slope

    def pulled_back(
        self, rows: Int[Tensor, " rows"], p: Float[Tensor, "rows n"]
    ) -> Float[Tensor, "rows n"]:
        """Slope of the prior's part of φ."""
        slope: Tensor = self.weight[rows, None] * self.stiffness(p - self.centre)
        return slope

    def stiffness(self, v: Float[Tensor, "rows n"]) -> Float[Tensor, "rows n"]:
        """C⁻¹ v of each image, in units of the weight."""
        if self.prior is None:
            return v
        each = self.prior.solve(v.reshape(len(v), self.images, -1))
        return each.to(v).reshape(v.shape)

    def add_prior(self, row: int, h: Float[Tensor, "n n"]) -> None:
        """Adds the prior's part of the Hessian to a matrix."""
        if self.prior is None:
            h.diagonal().add_(self.weight[row])
            return
        part = self.weight[row] * self.prior.precision.to(h)
        n = len(part)
        for start in range(0, len(h), n):
            h[start : start + n, start : start + n] += part

    def push(
        self, rows: Int[Tensor, " rows"], p: Tensor, v: Tensor, width: Tensor
    ) -> Float[Tensor, "rows d_theta"]:
        """J v / ‖g̃‖."""
        x, y, w = self._samples(rows, p, width)
        v = (v * self.input_scale).reshape(len(x), -1)
        out = self._products.jvp(x, y, v, w).double()
        return out.view(len(rows), self.images, -1).sum(1)

    def pull(
        self, rows: Int[Tensor, " rows"], p: Tensor, u: Tensor, width: Tensor
    ) -> Float[Tensor, "rows n"]:
        """Jᵀ u / ‖g̃‖."""
        return self._pull(self._products, rows, p, u, width)

    def gram(
        self, row: int, p: Float[Tensor, " n"], width: Tensor
    ) -> Float[Tensor, "n n"]:
        """JᵀJ/‖g̃‖² of one attack, formed from a dense J."""
        rows = torch.tensor([row], device=p.device)
        x, y, w = self._samples(rows, p[None], width[None])
        if self.images == 1:
            return gram(
                self._products,
                x[0],
                y[0],
                weight=w[0],
                input_scale=self.input_scale,
                workspace=self._workspace,
            ).h
        jacobians = []
        for i in range(self.images):
            n = x[i].numel()
            scale = self.input_scale[i * n : (i + 1) * n]
            jacobians.append(self._products.dense(x[i], y[i], torch.diag(scale), w[i]))
        columns = torch.cat(jacobians)
        total = columns.new_zeros((len(columns), len(columns)), dtype=torch.float64)
        # In float64 block by block: a float32 product would cost the small eigenvalues.
        step = max(1, 2**23 // len(columns))
        for block in torch.split(columns, step, dim=1):
            wide = block.double()
            total.addmm_(wide, wide.T)
        return total

    def _pull(
        self, at: GradientMap, rows: Tensor, p: Tensor, u: Tensor, width: Tensor
    ) -> Tensor:
        x, y, w = self._samples(rows, p, width)
        u = u.repeat_interleave(self.images, 0)
        out = at.vjp(x, y, u, w).double().view(len(rows), -1)
        return out * self.input_scale

    def _samples(
        self, rows: Tensor, p: Tensor, width: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Network inputs, labels with widths, and weights of the loss, by sample."""
        x = self.to_input(p).flatten(0, 1)
        own = (
            rows[:, None] * self.images + torch.arange(self.images, device=rows.device)
        ).flatten()
        widths = width.to(x).repeat_interleave(self.images)
        y = torch.cat([self._labels[own], widths[:, None]], 1)
        w = (1 / self.scale[rows] / self.images).repeat_interleave(self.images)
        return x, y, w
