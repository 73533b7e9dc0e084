"""What a defense is, and what it gives: the message, and what is known about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, final, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from leakwatch.checks import check_choice, first_not_finite
from leakwatch.defenses.budget import Budget
from leakwatch.defenses.covariance import Covariance
from leakwatch.defenses.mixing import Mixing
from leakwatch.defenses.samples import Samples

__all__ = [
    "Defense",
    "Knowledge",
    "Needs",
    "Reduction",
    "Shared",
    "averaging",
    "check_gradient",
    "combined",
    "perturbation",
]

Reduction: TypeAlias = Literal["mean", "sum"]
"""How the loss of a batch combines the losses of its samples."""

Needs: TypeAlias = Literal["gradient", "sample gradients", "samples", "jacobian"]
"""What a defense must be given: any gradient, a batch's too; the gradient of each
sample; the samples as well; or the samples, whose J it forms."""


@final
@dataclass(frozen=True, eq=False)
class Knowledge:
    """What an attacker who knows the defense knows of each message.

    The worst case: the attacker has what depends on the private sample too, the
    directions of :class:`EigenNoise` and the rows of J of its ``diagonal`` allocation,
    which today's attackers would have to guess from their own estimate of the image.

    Attributes:
        covariance: of the noise; ``None`` where there is none, or where it is not
            known in closed form.
        kept: entries that were not set to zero, ``(n, d_θ)``; ``None`` for all.
        clip: the norm that messages were shortened to, before the noise, where they
            were longer; ``None`` if they weren't.
        mixing: partners and coefficients of mixed samples.
        closed_form: whether ``covariance`` is all of the noise there is.
    """

    covariance: Covariance | None = None
    kept: Bool[Tensor, "n d_theta"] | None = None
    clip: float | None = None
    mixing: Mixing | None = None
    closed_form: bool = True


@final
@dataclass(frozen=True, eq=False)
class Shared:
    """What leaves the client.

    Attributes:
        gradient: the messages, ``(n, d_θ)``, in the dtype of what went in.
        clean: what went in, the same shape.
        variance: E‖noise‖² of each message, ``(n,)``, float64: of the random part
            only, in the mean over its draws; 0 for a defense that draws nothing.
        knowledge: what an adaptive attacker knows.
        bias: E message − g, what is not random, the shape of the messages; ``None``
            for nothing.
    """

    gradient: Float[Tensor, "n d_theta"]
    clean: Float[Tensor, "n d_theta"]
    variance: Float[Tensor, " n"]
    knowledge: Knowledge = field(default_factory=Knowledge)
    bias: Float[Tensor, "n d_theta"] | None = None

    @classmethod
    def noisy(
        cls,
        gradient: Float[Tensor, "n d_theta"],
        delta: Float[Tensor, "n d_theta"],
        covariance: Covariance,
    ) -> Shared:
        """Gradients with noise of known covariance.

        Args:
            gradient: clean gradients.
            delta: the noise drawn, float64.
            covariance: of the noise.
        """
        noisy = (gradient.double() + delta.to(gradient.device)).to(gradient.dtype)
        return cls(noisy, gradient, covariance.total, Knowledge(covariance))

    @classmethod
    def fixed(
        cls,
        message: Float[Tensor, "n d_theta"],
        gradient: Float[Tensor, "n d_theta"],
        knowledge: Knowledge | None = None,
    ) -> Shared:
        """Messages in which nothing is random, given what is known of them.

        Args:
            message: what is shared in place of the gradients.
            gradient: clean gradients.
            knowledge: what an adaptive attacker knows; default: nothing.
        """
        none = torch.zeros(len(gradient), dtype=torch.float64, device=gradient.device)
        told = Knowledge() if knowledge is None else knowledge
        return cls(message, gradient, none, told, bias=message - gradient)

    @property
    def delta(self) -> Float[Tensor, "n d_theta"]:
        """δ, what was added; goes into I²F: ``leakwatch.score(..., delta=δ)``.

        A difference of what was rounded to the dtype of the message.
        """
        return self.gradient - self.clean


class Defense(ABC):
    """Turns gradients, and the samples that made them, into what is shared.

    Randomness comes from the generator that is given, on any device, and from nowhere
    else; the same state gives the same messages. A subclass states ``name``, ``needs``
    and ``budget``, as fields or class variables, and makes each message in
    :meth:`protect`. That is all that training, attacks and trade-offs ask of it.

    Attributes:
        name: recorded with results.
        needs: what must be given to :meth:`protect`.
        budget: √E‖δ‖² that was asked for; ``None`` where it follows from the gradient.

    Example:
        A defense that rounds, as compression does, with a step whose error is the
        budget. Registered, ``leakwatch.trade_off`` takes it by its name; in YAML it
        goes by its class path.

        >>> from dataclasses import dataclass
        >>> from typing import ClassVar
        >>> import torch
        >>> from leakwatch.defenses import Budget, Defense, Needs, Shared
        >>> from leakwatch.defenses import register_defense
        >>>
        >>> @dataclass(frozen=True)
        ... class Rounding(Defense):
        ...     budget: Budget
        ...     name: ClassVar[str] = "rounding"
        ...     needs: ClassVar[Needs] = "gradient"
        ...
        ...     def protect(self, gradient, *, generator, samples=None):
        ...         size = gradient.shape[1]
        ...         total = self.budget.variance(gradient.norm(dim=1), size)
        ...         # An error uniform on a step s has a mean square of s²/12.
        ...         step = (12 * total / size).sqrt()[:, None].to(gradient)
        ...         return Shared.fixed((gradient / step).round() * step, gradient)
        >>>
        >>> register_defense("rounding", Rounding)
        >>> shared = Rounding(Budget(0.1, "std")).protect(
        ...     torch.randn(1, 10_000), generator=torch.Generator())
        >>> round(float(shared.delta.std()), 2)
        0.1
    """

    # Not at run time: a dataclass takes a property of its base for a field's default.
    if TYPE_CHECKING:

        @property
        def name(self) -> str:
            """Recorded with results."""

        @property
        def needs(self) -> Needs:
            """What must be given to :meth:`protect`."""

        @property
        def budget(self) -> Budget | None:
            """√E‖δ‖² that was asked for, if any was."""

    @abstractmethod
    def protect(
        self,
        gradient: Float[Tensor, "n d_theta"],
        *,
        generator: torch.Generator,
        samples: Samples | None = None,
    ) -> Shared:
        """Each row is a message of its own.

        Args:
            gradient: clean gradients, one of each sample unless ``needs`` is
                ``"gradient"``.
            generator: random stream.
            samples: what made them; see ``needs``.

        Raises:
            ValueError: for gradients that are not finite, or samples that are missing
                or of another number.
        """

    def protect_batch(
        self,
        gradient: Float[Tensor, "n d_theta"],
        *,
        generator: torch.Generator,
        samples: Samples | None = None,
        reduction: Reduction = "mean",
    ) -> Shared:
        """One message for all rows, combined as the loss combines samples.

        The budget is that of the message. Unless a defense says otherwise, one that
        needs gradients only protects the combined gradient, and any other the gradient
        of each sample before they are combined. Args and errors as for :meth:`protect`.

        Args:
            gradient: of each sample, not divided by the size of the batch.
            generator: random stream.
            samples: what made them.
            reduction: whether the message is their mean or their sum.
        """
        if self.needs == "gradient":
            message = combined(gradient, reduction)
            return self.protect(message, generator=generator, samples=samples)
        each = self.protect(gradient, generator=generator, samples=samples)
        return summed(each, reduction)

    def with_budget(self, budget: Budget) -> Defense:
        """The same defense with another budget; itself where it can't be given one."""
        this = cast(Any, self)
        own = fields(this) if hasattr(self, "__dataclass_fields__") else ()
        if "budget" not in {field.name for field in own}:
            return self
        changed: Defense = replace(this, budget=budget)
        return changed

    def with_layers(self, sizes: Mapping[str, int]) -> Defense:
        """The same defense, told how many entries each parameter tensor has."""
        return self

    @property
    def needs_basis(self) -> bool:
        """Whether it uses the singular directions of each sample's Jacobian."""
        return self.needs == "jacobian"


def combined(
    gradient: Float[Tensor, "n d_theta"], reduction: Reduction
) -> Float[Tensor, "one d_theta"]:
    """The mean or the sum of the rows, as one row.

    Raises:
        ValueError: for an unknown reduction.
    """
    weight = averaging(len(gradient), reduction)
    return weight * gradient.sum(0, keepdim=True)


def averaging(n: int, reduction: Reduction) -> float:
    """The factor on each sample's gradient: 1/n for the mean, 1 for the sum.

    Raises:
        ValueError: for an unknown reduction.
    """
    check_choice("reduction", reduction, get_args(Reduction))
    return 1 / n if reduction == "mean" else 1.0


def summed(shared: Shared, reduction: Reduction) -> Shared:
    """The messages of samples, which were protected one by one, as one message.

    Args:
        shared: independent messages.
        reduction: how they are combined.
    """
    weight = averaging(len(shared.gradient), reduction)
    knowledge = shared.knowledge
    each = knowledge.covariance
    covariance = None if each is None else each.summed(weight)
    lost = each is not None and covariance is None
    return Shared(
        combined(shared.gradient, reduction),
        combined(shared.clean, reduction),
        weight**2 * shared.variance.sum(0, keepdim=True),
        replace(
            knowledge,
            covariance=covariance,
            closed_form=knowledge.closed_form and not lost,
        ),
        None if shared.bias is None else combined(shared.bias, reduction),
    )


def needed(
    samples: Samples | None, gradient: Float[Tensor, "n d_theta"], name: str
) -> Samples:
    """The samples of these gradients.

    Raises:
        ValueError: if they are missing, or of another number.
    """
    if samples is None:
        raise ValueError(
            f"{name} looks at the samples behind the gradients; pass "
            f"samples=Samples(GradientMap(module), x, y)."
        )
    check_gradient(gradient, len(samples))
    return samples


def perturbation(
    defense: Defense,
    generator: torch.Generator,
    samples: Samples | None = None,
) -> Callable[[Float[Tensor, "targets d_theta"]], Float[Tensor, "targets d_theta"]]:
    """A defense as the ``perturb=`` of an attack.

    Args:
        defense: the defense.
        generator: its random stream; goes on from call to call.
        samples: those that are attacked, in their order. With several in each target,
            every target is one batch with the mean loss; without samples each target
            is taken for the gradient of one.

    Returns:
        Gradients of targets to what is shared.

    Raises:
        ValueError: when called, if the targets can't be told from the samples.

    Example:
        >>> import torch
        >>> from leakwatch import attack
        >>> from leakwatch.defenses import Budget, GaussianNoise
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
        >>> noise = GaussianNoise(Budget(1e-2, "relative"))
        >>> x, y = torch.rand(2, 1, 2, 2), torch.tensor([0, 2])
        >>> found = attack(net, x, y, "lavp-l2", steps=2,
        ...                perturb=perturbation(noise, torch.Generator()))
        >>> found.images.shape
        torch.Size([2, 1, 2, 2])
    """

    def perturb(gradient: Tensor) -> Tensor:
        n = len(gradient)
        if samples is None or len(samples) == n:
            shared = defense.protect(gradient, generator=generator, samples=samples)
            return shared.gradient
        if len(samples) % n:
            raise ValueError(
                f"{len(samples)} samples can't be divided among {n} targets; pass the "
                f"samples that are attacked."
            )
        images = len(samples) // n
        parts = [
            samples.select(slice(i, i + images)) for i in range(0, n * images, images)
        ]
        batches = [
            defense.protect_batch(p.gradient, generator=generator, samples=p)
            for p in parts
        ]
        return torch.cat([batch.gradient for batch in batches])

    return perturb


def check_gradient(gradient: Tensor, rows: int | None = None) -> None:
    """Raises unless these are finite gradients, one in each row.

    Args:
        gradient: what was given.
        rows: how many are expected, any number when None.

    Raises:
        ValueError: another shape, integers, or NaN or infinity in a row.
    """
    if gradient.ndim != 2 or 0 in gradient.shape or not gradient.is_floating_point():
        raise ValueError(
            f"gradient must be (n, d_θ), floating point, one message in each row, got "
            f"{tuple(gradient.shape)} of {gradient.dtype}."
        )
    if rows is not None and len(gradient) != rows:
        raise ValueError(
            f"gradient has {len(gradient)} rows, but there are {rows} samples; this "
            f"defense needs the gradient of each sample."
        )
    row = first_not_finite(gradient)
    if row is not None:
        raise ValueError(
            f"gradient of row {row} is not finite; skip that step, as the optimiser "
            f"would have to."
        )
