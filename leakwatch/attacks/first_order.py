"""The engine of the published attacks: many gradient-matching descents at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, final, get_args

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from leakwatch.attacks.base import (
    GradientAttack,
    GradientTask,
    SearchResult,
    labels_of,
    refuse_unknown,
)
from leakwatch.attacks.labels.infer import LabelMethod
from leakwatch.attacks.matching import distances
from leakwatch.attacks.matching.objective import (
    Evaluation,
    Matcher,
    MatchingProblem,
    PathName,
)
from leakwatch.attacks.matching.priors import BatchStatistics, Priors
from leakwatch.attacks.optimizers.descent import DescentObjective, descend
from leakwatch.attacks.optimizers.first_order import DescentSettings, ScheduleName
from leakwatch.attacks.optimizers.state import DescentState
from leakwatch.attacks.shared_gradient import SharedGradient
from leakwatch.attacks.start import stream
from leakwatch.checks import check_choice, check_integer, check_number
from leakwatch.derivatives import GradientMap
from leakwatch.priors import GaussianPrior

__all__ = ["FirstOrder"]


@final
@dataclass(frozen=True)
class FirstOrder(DescentSettings, GradientAttack):
    """Descends on the distance between gradients, for all targets and restarts at once.

    Minimises D(g(x), g*) plus priors. The presets in
    :mod:`leakwatch.attacks.presets` are instances of it. How it descends is set as in
    :class:`leakwatch.attacks.optimizers.first_order.DescentSettings`.

    Args:
        name: recorded in results.
        optimizer: ``"adam"``, ``"sgd"`` with momentum, or ``"lbfgs"``.
        lr: step size, network-input units for Adam; first trial length for L-BFGS.
        momentum: of ``"sgd"``.
        signed: whether the gradient of the objective is replaced by its signs.
        schedule: of the step size: ``"constant"``, ``"step"`` or ``"cosine"``, see
            :func:`leakwatch.attacks.optimizers.first_order.schedule`.
        steps: evaluations of the gradient per attack.
        box: whether images are kept in the range of pixels, where that is known; not
            with L-BFGS.
        patience: attacks are finished when their objective has not improved for this
            many steps. Default: never.
        distance: ``"l2"``, ``"cosine"`` or ``"l1"``, see
            :func:`leakwatch.attacks.matching.distances.get`.
        priors: weights of total variation, norm and BatchNorm statistics.
        relative: whether the distance is divided by ‖g*‖² (L2) or ‖g*‖ (L1), so that
            the priors weigh the same for all samples.
        layer_weights: factors of the layers' parts of the distance, see
            :class:`MatchingProblem`.
        statistics: the client's own batch statistics, if the attacker is granted them.
        joint_labels: whether the labels are optimised together with the images; known
            labels are not looked at then.
        label_method: how unknown labels are inferred otherwise, see
            :func:`leakwatch.attacks.labels.infer.infer_labels`.
        tolerance: attacks are finished when the gradient is matched to this relative
            error. Default: 20 times the rounding error of the arithmetic.
        path: see :class:`MatchingProblem`.
        chunk_size: attacks evaluated at once.

    Raises:
        ValueError: for values that make no sense; quotes them.

    Example:
        >>> import torch
        >>> from leakwatch.attacks import PixelScale, SharedGradient, Start
        >>> net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Sigmoid(),
        ...                           torch.nn.Linear(8, 3))
        >>> gradients = GradientMap(net, dtype=torch.float64)
        >>> x, y = torch.rand(2, 6), torch.tensor([0, 2])
        >>> settings = FirstOrder(optimizer="lbfgs", distance="l2", box=False, steps=20)
        >>> result = settings.run(
        ...     gradients, SharedGradient.of(gradients, x, y),
        ...     pixels=PixelScale(), start=Start.normal(), seed=0, restarts=2)
        >>> result.images.shape, len(result.status)
        (torch.Size([2, 6]), 2)
    """

    name: str = "first-order"
    schedule: ScheduleName = field(default="step", kw_only=True)
    distance: str = "cosine"
    priors: Priors = field(default_factory=Priors)
    relative: bool = False
    layer_weights: Mapping[str, float] | Sequence[float] | None = None
    statistics: BatchStatistics | None = None
    joint_labels: bool = False
    label_method: LabelMethod = "auto"
    tolerance: float | None = None
    path: PathName = "auto"
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        distances.get(self.distance)
        if self.chunk_size is not None:
            check_integer("chunk_size", self.chunk_size, example=8)
        check_choice("label_method", self.label_method, get_args(LabelMethod))
        if self.tolerance is not None:
            check_number("tolerance", self.tolerance, "[0, inf)", example=1e-5)

    def search(self, task: GradientTask) -> SearchResult:
        """Descends from the first images."""
        x = task.first_images(box=self.box)
        problem = MatchingProblem(
            task.gradients,
            task.shared,
            self.distance,
            layer_weights=self.layer_weights,
            batch_norm=self.priors.batch_norm,
            first_layer=self.priors.first_layer,
            statistics=self.statistics,
            relative=self.relative,
            soft_targets=self.joint_labels,
            path=self.path,
            chunk_size=self.chunk_size,
        )
        with problem.opened() as matcher:
            logits = None
            if self.joint_labels:
                logits = _first_logits(task, matcher.classes(x[0, 0, 0])).to(x)
            return descend(
                x,
                _Matching(self, problem, matcher),
                self,
                task.pixels,
                labels=task.labels,
                logits=logits,
                deadline=task.deadline,
                progress=task.progress,
            )

    def labels_of(
        self, shared: SharedGradient, gradients: GradientMap
    ) -> tuple[Shaped[Tensor, "targets images ..."], tuple[str, ...]]:
        """Known labels, or inferred ones; none where they are optimised."""
        if self.joint_labels:
            nothing = torch.zeros(shared.targets, shared.images, dtype=torch.long)
            return nothing, ("",) * shared.targets
        return labels_of(shared, gradients, self.label_method)

    def check(self, module: nn.Module) -> None:
        """Refuses networks without BatchNorm when there is a prior for it.

        Raises:
            ValueError: there.
        """
        normalised = any(
            isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()
        )
        if self.priors.batch_norm > 0 and not normalised:
            raise ValueError(
                f"attack {self.name!r} uses BatchNorm statistics as a prior, but "
                f"{type(module).__name__} has no BatchNorm; use batch_norm=0, or "
                f"choose another attack, for instance attack='lavp-l2'."
            )

    def fit_to(
        self,
        sample_shape: tuple[int, ...],
        *,
        prior_std: float,
        prior_mean: Float[Tensor, "*sample"] | None,
        prior: GaussianPrior | None = None,
    ) -> Self:
        """Without total variation where samples are no images."""
        return self if len(sample_shape) >= 3 else self.changed(tv=0.0)

    @classmethod
    def setting_names(cls) -> list[str]:
        """The fields, and those of the priors."""
        return [*super().setting_names(), *Priors.__dataclass_fields__]

    def changed(self, **settings: object) -> Self:
        """The same attack with other settings.

        Args:
            settings: of this class, and ``tv``, ``l2``, ``batch_norm``,
                ``first_layer`` of its priors.

        Returns:
            A new attack.

        Raises:
            ValueError: for a setting that there isn't; lists those that there are.

        Example:
            >>> FirstOrder().changed(tv=1e-3, steps=10).priors.tv
            0.001
        """
        refuse_unknown(self.name, settings.keys() - {"priors"}, self.setting_names())
        priors = settings.pop("priors", self.priors)
        if not isinstance(priors, Priors):
            raise ValueError(f"priors must be Priors(...), got {priors!r}.")
        inner = settings.keys() & Priors.__dataclass_fields__
        terms = {name: settings.pop(name) for name in inner}
        settings["priors"] = replace(priors, **terms)  # type: ignore[arg-type]
        return super().changed(**settings)


@final
class _Matching(DescentObjective):
    """The distance of gradients with priors, scaled to a moderate size."""

    def __init__(
        self, attack: FirstOrder, problem: MatchingProblem, matcher: Matcher
    ) -> None:
        self._matcher = matcher
        self._priors = attack.priors
        target = problem.shared.gradient.to(matcher.device, torch.float64)
        tolerance = attack.tolerance
        if tolerance is None:
            tolerance = 20 * torch.finfo(matcher.dtype).eps
        self.matched_below = _matched_below(attack.distance, target, tolerance)
        length = target.norm(dim=1)
        # Adam's ε and the tests of L-BFGS see objectives of moderate size however
        # small a gradient is; plain descent takes the objective as it is.
        self._scale: Tensor | None = None
        degree = problem.distance.degree
        if not attack.relative and attack.optimizer != "sgd" and degree != 0:
            nonzero = torch.where(length > 0, length, torch.ones_like(length))
            self._scale = nonzero**-degree

    def evaluate(self, state: DescentState, step: int) -> Evaluation:
        """See :class:`DescentObjective`."""
        values = self._matcher.evaluate(state.images, state.targets(), state.target)
        gradient, target_gradient = values.gradient, values.target_gradient
        objective = values.objective + self._priors.add_to(state.images, gradient)
        if self._scale is not None:
            scale = self._scale[state.target].to(gradient.dtype)
            objective = objective * scale
            gradient = gradient * _over(scale, gradient)
            if target_gradient is not None:
                target_gradient = target_gradient * _over(scale, target_gradient)
        return Evaluation(values.distance, objective, gradient, target_gradient)


def _matched_below(
    distance: str, target: Float[Tensor, "targets d_theta"], tolerance: float
) -> Float[Tensor, " targets"]:
    """Distance at which a target counts as matched to rounding."""
    if distance == "cosine":
        return torch.full_like(target[:, 0], 0.5 * tolerance**2)
    if distance == "l1":
        return tolerance * target.abs().sum(1)
    return 0.5 * tolerance**2 * target.square().sum(1)


def _over(numbers: Tensor, like: Tensor) -> Tensor:
    return numbers.view(-1, *[1] * (like.ndim - 1))


def _first_logits(
    task: GradientTask, classes: int
) -> Float[Tensor, "restarts targets images classes"]:
    """N(0, 1) for each class, from streams of their own beside those of the images."""
    rows = [
        torch.randn(
            task.shared.images,
            classes,
            dtype=torch.float64,
            generator=stream(task.seed, name, restart, 1),
        )
        for name, restart in task.places
    ]
    return torch.stack(rows).view(task.restarts, -1, *rows[0].shape)
