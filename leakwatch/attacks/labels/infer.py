"""Labels from the shared gradient, without any attack on the images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakwatch.attacks.labels.counts import count_labels, present_classes
from leakwatch.attacks.labels.last_layer import Head, HeadGradient, find_head
from leakwatch.attacks.shared_gradient import SharedGradient
from leakwatch.derivatives import GradientMap
from leakwatch.status import OK, Status

__all__ = ["LabelMethod", "Labels", "infer_labels", "label_accuracy"]

# Standard deviations of the noise by which the label's entry must stand out.
_CLEAR: Final = 6.0

LabelMethod: TypeAlias = Literal["auto", "sign", "minimum", "count"]


@final
@dataclass(frozen=True, eq=False)
class Labels:
    """Inferred labels.

    Attributes:
        labels: of each target, ascending: a gradient says nothing about the order.
        status: per target. ``ok``: the gradient itself confirms them; ``estimated``:
            the best guess, and why it is one; ``failed``: the gradient of the last
            layer is zero, the labels mean nothing.
        method: the rule that was used.
    """

    labels: Int[Tensor, "targets images"]
    status: tuple[Status, ...]
    method: str


def infer_labels(
    shared: SharedGradient,
    gradients: GradientMap,
    method: LabelMethod = "auto",
    *,
    auxiliary: Float[Tensor, "n ..."] | None = None,
    seed: int = 0,
) -> Labels:
    """Reads the labels off the gradient of the last linear layer.

    With softmax cross-entropy the gradient of the logits is p − e_y: negative at the
    label, positive elsewhere.

    - ``sign``, one sample: the class whose bias gradient is negative (Zhao et al.
      2020, iDLG); without a bias, the row of the weight gradient that points against
      all others.
    - ``minimum``, batches *without repeated labels*: the classes whose weight gradients
      have the smallest minimum over features (Yin et al. 2021, GradInversion), which
      must not be negative themselves (ReLU, sigmoid).
    - ``count``, any batch: see :mod:`leakwatch.attacks.labels.counts`.

    Args:
        shared: what the attacker is given; its labels are not looked at.
        gradients: the map that it comes from.
        method: ``auto`` is ``sign`` for single samples and ``count`` for batches.
        auxiliary: inputs of the attacker's own, for ``count`` and for layers without a
            bias; see :func:`leakwatch.attacks.labels.last_layer.find_head`.
        seed: of the random guesses in their place.

    Returns:
        Labels with a status for each target.

    Raises:
        ValueError: for an unknown method, ``sign`` with more than one image, or
            ``minimum`` with more images than classes.
        UnsupportedModuleError: if the logits are not the output of a linear layer of
            its own.

    Example:
        >>> net = torch.nn.Linear(5, 4)
        >>> gradients = GradientMap(net)
        >>> x, y = torch.rand(3, 5), torch.tensor([2, 0, 3])
        >>> shared = SharedGradient.of(gradients, x, y).without_labels()
        >>> infer_labels(shared, gradients).labels.flatten().tolist()
        [2, 0, 3]
    """
    if method not in ("auto", "sign", "minimum", "count"):
        raise ValueError(
            f"unknown method {method!r}; choose from auto, sign, minimum, count."
        )
    rule = method
    if rule == "auto":
        rule = "sign" if shared.images == 1 else "count"
    if rule == "sign" and shared.images > 1:
        raise ValueError(
            f"the sign rule is for one image, these gradients average "
            f"{shared.images}; use method='count'."
        )
    head = find_head(gradients, shared.sample_shape, auxiliary=auxiliary, seed=seed)
    if rule == "minimum" and shared.images > head.classes:
        raise ValueError(
            f"the minimum rule finds each class once, but there are {shared.images} "
            f"images and {head.classes} classes; use method='count'."
        )
    rows, statuses = [], []
    for gradient in shared.gradient.detach().cpu():
        labels, status = _infer(head, head.read(gradient), shared, rule)
        rows.append(labels.sort().values)
        statuses.append(_qualified(status, head, rule))
    labels = torch.stack(rows).to(shared.gradient.device)
    return Labels(labels, tuple(statuses), rule)


def label_accuracy(
    inferred: Int[Tensor, "targets images"], true: Int[Tensor, "targets images"]
) -> Float[Tensor, " targets"]:
    """Share of each target's labels that were found, counting repeats, in any order.

    Args:
        inferred: labels of each target.
        true: the same.

    Returns:
        In [0, 1], float64.

    Example:
        >>> a = torch.tensor([[1, 1, 2, 3]])
        >>> label_accuracy(a, torch.tensor([[1, 3, 3, 5]])).item()
        0.5
    """
    classes = int(max(inferred.max(), true.max())) + 1
    counts = [
        torch.stack([row.bincount(minlength=classes) for row in each])
        for each in (inferred, true)
    ]
    return torch.minimum(*counts).sum(1).double() / true.shape[1]


def _infer(
    head: Head, g: HeadGradient, shared: SharedGradient, rule: str
) -> tuple[Tensor, Status]:
    if float(g.weight.abs().max()) == 0 and float(g.bias.abs().max()) == 0:
        nothing = torch.zeros(shared.images, dtype=torch.long)
        return nothing, Status(
            "failed", f"the gradient of {head.name} is zero: it shows no label"
        )
    if rule == "sign":
        return _sign(head, g, shared.noise_std)
    if rule == "minimum":
        return _minimum(head, g, shared)
    counts, status = count_labels(head, g, shared.images, shared.noise_std)
    return torch.arange(head.classes).repeat_interleave(counts), status


def _sign(head: Head, g: HeadGradient, noise_std: float) -> tuple[Tensor, Status]:
    slope = g.bias
    if not head.has_bias:
        # The rows are (p − e_y)_c · a: one direction, of which the label's share is as
        # long as all others together and points the other way.
        left, size, _ = torch.linalg.svd(g.weight, full_matrices=False)
        slope = left[:, 0] * size[0]
        label = slope.abs().argmax()
        slope = -slope * slope[label].sign()
        if head.classes == 2:
            label = g.weight.sum(1).argmin()
            status = OK if head.nonnegative else _TWO_CLASSES
            return label[None], status
    label = slope.argmin()
    others = slope[torch.arange(head.classes) != label]
    noise = max(noise_std, g.noise) if head.has_bias else 0.0
    if float(others.min() - slope[label]) < _CLEAR * noise:
        return label[None], Status(
            "estimated", "noise on the gradient may have hidden the label"
        )
    if -float(others.min()) > max(1e-3 * float(slope.abs().max()), _CLEAR * noise):
        count = 1 + int((others < 0).sum())
        return label[None], Status(
            "estimated",
            f"{count} classes have a negative gradient where one sample leaves one: "
            f"noise, a defense, or more than one sample",
        )
    return label[None], OK


def _minimum(
    head: Head, g: HeadGradient, shared: SharedGradient
) -> tuple[Tensor, Status]:
    labels = g.weight.amin(1).argsort()[: shared.images]
    certain = present_classes(head, g, shared.noise_std)
    if head.nonnegative and bool(certain[labels].all()):
        return labels, OK
    count = int(certain[labels].sum())
    return labels, Status(
        "estimated",
        f"{count} of {shared.images} labels are certain; the others are the likeliest "
        f"if none repeats",
    )


def _qualified(status: Status, head: Head, rule: str) -> Status:
    if rule == "sign" or head.has_bias or status.word == "failed":
        return status
    if rule == "minimum" and head.nonnegative:
        return status
    return Status(
        "estimated",
        f"{head.name} has no bias, so the mean of its features is guessed"
        + (f"; {status.reason}" if status.reason else ""),
    )


_TWO_CLASSES = Status(
    "estimated",
    "two classes, no bias and features of both signs: the gradient doesn't tell which",
)
