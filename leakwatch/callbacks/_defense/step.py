"""One step of a defended optimiser: what it consumes, what was drawn, what arrived."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from leakwatch.defenses import Defense

__all__ = [
    "BasisCost",
    "DefenseSummary",
    "Draw",
    "StepMeasurement",
    "Tally",
    "consumed",
    "finite",
    "flat",
    "noised",
    "write",
]

# From so many steps on, their mean says whether the noise has the size asked for.
_ENOUGH = 10
_SIZE_OFF = 0.05


@final
@dataclass(frozen=True)
class DefenseSummary:
    """What a defense did so far; all sizes are root mean squares over steps.

    Attributes:
        steps: of optimisers, that consumed a defended gradient.
        skipped: gradients that no step consumed: not finite under a loss scaler, or
            left behind by a skipped batch.
        asked: √E‖δ‖² that the defense stated, gradient units.
        applied: ‖δ‖, with δ = the gradient consumed − the clean one.
        std: standard deviation of the random part of δ over entries.
        relative: ‖δ‖/‖g‖; infinite where g = 0.
        mismatch: the largest ‖δ applied − δ drawn‖/‖δ drawn‖ of a step.
        seconds: spent in total.
        bases_formed: decompositions of a sample's Jacobian; 0 for defenses without.
        bases_reused: how often one of an earlier step took their place.
        basis_seconds: spent on forming them; a part of ``seconds``.
    """

    steps: int
    skipped: int
    asked: float
    applied: float
    std: float
    relative: float
    mismatch: float
    seconds: float
    bases_formed: int
    bases_reused: int
    basis_seconds: float


@final
@dataclass(frozen=True)
class BasisCost:
    """What the directions of the samples of one step cost.

    Attributes:
        formed: how many samples were decomposed.
        reused: how many had been in an earlier step.
        seconds: spent on the former.
    """

    formed: int = 0
    reused: int = 0
    seconds: float = 0.0

    def values(self) -> dict[str, float]:
        """What is logged about them, by key."""
        return {
            "bases_formed": float(self.formed),
            "bases_reused": float(self.reused),
            "basis_seconds": self.seconds,
        }


@final
@dataclass(frozen=True, eq=False)
class Draw:
    """What one step is to consume.

    Attributes:
        parameters: whose gradients are the message, in its order.
        clean: what the step would have consumed, ``(d_θ,)``, float64: clipped.
        delta: what is added to it.
        bias: the part of it that is not random; ``None`` for nothing.
        variance: E‖·‖² of the random part.
        bases: what its directions cost; ``None`` for a defense without.
    """

    parameters: Sequence[nn.Parameter]
    clean: Float[Tensor, " d_theta"]
    delta: Float[Tensor, " d_theta"]
    bias: Float[Tensor, " d_theta"] | None
    variance: float
    bases: BasisCost | None = None


@final
@dataclass(frozen=True)
class StepMeasurement:
    """What one step consumed.

    Attributes:
        asked: √E‖δ‖².
        applied: ‖δ‖.
        noise: norm of the random part of δ.
        variance: E of its square.
        size: d_θ.
        relative: ‖δ‖/‖g‖.
        mismatch: how far δ is from what was drawn, relative to that.
    """

    asked: float
    applied: float
    noise: float
    variance: float
    size: int
    relative: float
    mismatch: float

    @classmethod
    def of(cls, drawn: Draw) -> StepMeasurement:
        """Compares the gradients as they are now with what was drawn.

        Args:
            drawn: what the step was to consume.
        """
        applied, delta = flat(drawn.parameters) - drawn.clean, drawn.delta
        compared = [applied, drawn.clean, delta, applied - delta]
        if drawn.bias is not None:
            compared += [drawn.bias, applied - drawn.bias]
        # On a GPU each look at one would wait for it.
        norms = torch.stack([t.norm() for t in compared]).tolist()
        norm, clean, size, apart = norms[:4]
        bias, noise = norms[4:] or (0.0, norm)
        return cls(
            asked=math.sqrt(drawn.variance + bias**2),
            applied=norm,
            noise=noise,
            variance=drawn.variance,
            size=len(applied),
            relative=_ratio(norm, clean),
            mismatch=_ratio(apart, size),
        )

    @property
    def std(self) -> float:
        """Standard deviation of the random part over entries."""
        return self.noise / math.sqrt(self.size)

    def values(self, seconds: float) -> dict[str, float]:
        """What is logged about the step, by key.

        Args:
            seconds: what the defense took.
        """
        return {
            "asked_norm": self.asked,
            "applied_norm": self.applied,
            "applied_std": self.std,
            "relative_norm": self.relative,
            "seconds": seconds,
        }


@final
@dataclass
class Tally:
    """Sums over steps. Fields are those of :class:`DefenseSummary`, squared."""

    steps: int = 0
    skipped: int = 0
    asked: float = 0.0
    applied: float = 0.0
    noise: float = 0.0
    entries: int = 0
    relative: float = 0.0
    mismatch: float = 0.0
    seconds: float = 0.0
    ratios: int = 0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    bases_formed: int = 0
    bases_reused: int = 0
    basis_seconds: float = 0.0

    def add(
        self, step: StepMeasurement, seconds: float, bases: BasisCost | None = None
    ) -> None:
        """Counts a step.

        Args:
            step: what it consumed.
            seconds: what the defense took.
            bases: of it, what directions took.
        """
        if bases is not None:
            self.bases_formed += bases.formed
            self.bases_reused += bases.reused
            self.basis_seconds += bases.seconds
        self.steps += 1
        self.asked += step.asked**2
        self.applied += step.applied**2
        self.noise += step.noise**2
        self.entries += step.size
        self.relative += step.relative**2
        self.mismatch = max(self.mismatch, step.mismatch)
        self.seconds += seconds
        if step.variance > 0:
            ratio = step.noise**2 / step.variance
            self.ratios += 1
            self.ratio += ratio
            self.ratio_squared += ratio**2

    @property
    def off(self) -> float | None:
        """Root mean square noise over the one asked for, where these clearly differ.

        ``None`` before ten steps, and while the difference is within 5 % and three
        standard errors of the mean.
        """
        n = self.ratios
        if n < _ENOUGH:
            return None
        mean = self.ratio / n
        spread = max(0.0, self.ratio_squared / n - mean**2)
        size = math.sqrt(mean)
        error = math.sqrt(spread / (n - 1)) / (2 * size) if size > 0 else 0.0
        return size if abs(size - 1) > _SIZE_OFF + 3 * error else None

    @property
    def summary(self) -> DefenseSummary:
        """Means; NaN before the first step."""
        n = self.steps or math.nan
        return DefenseSummary(
            steps=self.steps,
            skipped=self.skipped,
            asked=math.sqrt(self.asked / n),
            applied=math.sqrt(self.applied / n),
            std=math.sqrt(self.noise / (self.entries or math.nan)),
            relative=math.sqrt(self.relative / n),
            mismatch=self.mismatch,
            seconds=self.seconds,
            bases_formed=self.bases_formed,
            bases_reused=self.bases_reused,
            basis_seconds=self.basis_seconds,
        )

    def state(self) -> dict[str, Any]:
        """For a checkpoint; ``Tally(**state)`` goes on."""
        return asdict(self)


def consumed(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters whose gradients the next step consumes, each once, in order.

    Args:
        optimizer: the optimiser.

    Raises:
        RuntimeError: for a sparse gradient.
    """
    parameters: dict[int, nn.Parameter] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.layout != torch.strided:
                raise RuntimeError(
                    f"a parameter of shape {tuple(p.shape)} has a sparse gradient, and "
                    f"noise on the entries that it holds would tell which rows were "
                    f"used; make its layer with sparse=False."
                )
            parameters[id(p)] = p
    return list(parameters.values())


def finite(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether no gradient holds NaN or infinity.

    Args:
        parameters: whose gradients.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    flags = [torch.isfinite(g).all().to(grads[0].device) for g in grads]
    return not flags or bool(torch.stack(flags).all())


def flat(parameters: Sequence[nn.Parameter]) -> Float[Tensor, " d_theta"]:
    """The gradients as one vector, float64.

    Args:
        parameters: all with a gradient.
    """
    grads = [p.grad.detach() for p in parameters if p.grad is not None]
    return torch.cat([g.reshape(-1).double() for g in grads])


def write(
    parameters: Sequence[nn.Parameter], vector: Float[Tensor, " d_theta"]
) -> None:
    """Puts a vector in place of the gradients, which stay the same tensors.

    Args:
        parameters: all with a gradient.
        vector: of as many entries as they have.
    """
    start = 0
    with torch.no_grad():
        for p in parameters:
            if p.grad is not None:
                p.grad.copy_(vector[start : start + p.numel()].view_as(p.grad))
                start += p.numel()


def noised(
    defense: Defense, parameters: Sequence[nn.Parameter], generator: torch.Generator
) -> Draw:
    """What a defense that needs the gradient only makes of that of the next step.

    Args:
        defense: ``needs`` is ``"gradient"``.
        parameters: all with a gradient.
        generator: random stream.
    """
    defense = defense.with_layers({str(i): p.numel() for i, p in enumerate(parameters)})
    clean = flat(parameters)
    shared = defense.protect(clean[None], generator=generator)
    return Draw(
        parameters,
        clean,
        shared.delta[0],
        None if shared.bias is None else shared.bias[0],
        float(shared.variance[0]),
    )


def _ratio(part: float, whole: float) -> float:
    if whole > 0:
        return part / whole
    return 0.0 if part == 0 else math.inf
