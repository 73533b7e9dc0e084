"""Whether an attack matched the gradient, by one measure for all attacks."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leakwatch.attacks.sharing import SharedGradient
from leakwatch.gradients import GradientMap
from leakwatch.status import OK, Status

__all__ = ["MATCHED", "matched_to", "mismatch", "verdict"]

#: A gradient counts as matched when the rest is at most this part of it.
MATCHED = 0.1

_CHUNK = 32


def mismatch(
    gradients: GradientMap,
    shared: SharedGradient,
    images: Float[Tensor, "targets images ..."],
    labels: Int[Tensor, "targets images"],
) -> tuple[Float[Tensor, " targets"], Float[Tensor, " targets"]]:
    """How far the gradients of these images are from the shared ones.

    Args:
        gradients: the map from samples to gradients.
        shared: the targets.
        images: one guess for each target, network-input units.
        labels: their labels.

    Returns:
        ‖g − g*‖/‖g*‖ and ‖g/‖g‖ − g*/‖g*‖‖, float64; infinite where they are not
        finite.
    """
    out = []
    step = _CHUNK if shared.images == 1 else 1
    for i in range(0, len(images), step):
        # One joint target at a time: all samples' gradients may not fit memory.
        x, y = images[i : i + step].flatten(0, 1), labels[i : i + step].flatten(0, 1)
        g = gradients(x, y).double()
        if shared.images > 1:
            g = g.mean(0, keepdim=True)
        target = shared.gradient[i : i + step].to(g)
        tiny = torch.finfo(g.dtype).tiny
        length = target.norm(dim=1).clamp_min(tiny)
        direction = g / g.norm(dim=1, keepdim=True).clamp_min(tiny)
        relative = (g - target).norm(dim=1) / length
        turned = (direction - target / length[:, None]).norm(dim=1)
        out.append(torch.stack([relative, turned]))
    found = torch.nan_to_num(torch.cat(out, 1), nan=math.inf, posinf=math.inf)
    return found[0], found[1]


def matched_to(shared: SharedGradient) -> Float[Tensor, " targets"]:
    """The relative rest up to which a gradient counts as matched.

    :data:`MATCHED`, and with noise of known size what that leaves at the true input:
    √(MATCHED² + (1.1 s √d_θ/‖g*‖)²). From 1 on, an image with no gradient at all would
    do, and matching says nothing.

    Args:
        shared: the targets.

    Returns:
        ``(targets,)``, float64.
    """
    g = shared.gradient.double()
    length = g.norm(dim=1).clamp_min(torch.finfo(g.dtype).tiny)
    noise = 1.1 * shared.noise_std * math.sqrt(g.shape[1]) / length
    out: Tensor = (noise.square() + MATCHED**2).sqrt()
    return out


def verdict(
    shared: SharedGradient,
    relative: Float[Tensor, " targets"],
    *,
    out_of_time: Bool[Tensor, " targets"] | None = None,
    diverged: Bool[Tensor, " targets"] | None = None,
    doubts: tuple[str, ...] | None = None,
) -> tuple[Status, ...]:
    """What each reconstruction is worth.

    A gradient that was not matched says that this attack failed, and which of its
    assumptions did; never that a sample is safe. A matched one does not promise the
    right image either: others may share the same gradient.

    Args:
        shared: the targets.
        relative: the rest of the gradient that was not matched; for attacks that only
            match the direction, of the direction.
        out_of_time: targets whose attacks were stopped by the clock.
        diverged: targets whose attacks all ended in values that are not finite.
        doubts: what else may have failed, such as inferred labels; empty for nothing.

    Returns:
        A status for each target.
    """
    limit = matched_to(shared).tolist()
    lengths = shared.gradient.double().norm(dim=1).tolist()
    found = []
    for i, rest in enumerate(relative.tolist()):
        doubt = f" {doubts[i]}" if doubts is not None and doubts[i] else ""
        late = out_of_time is not None and bool(out_of_time[i])
        broken = diverged is not None and bool(diverged[i])
        if lengths[i] == 0:
            found.append(Status("failed", "the shared gradient is zero."))
        elif limit[i] >= 1:
            text = (
                "the noise is as large as the gradient, so matching it says nothing;"
                " the attack's assumption of an informative gradient fails."
            )
            found.append(Status("not converged", text + doubt))
        elif rest <= limit[i]:
            found.append(OK)
        else:
            text = f"{_percent(rest)} of the gradient was not matched"
            if late:
                text += " when time was over; allow more."
            elif broken:
                text += ": the objective left the finite numbers; use a smaller lr."
            else:
                text += (
                    "; the optimiser ended in another minimum or needs more steps or "
                    "restarts."
                )
            found.append(Status("not converged", text + doubt))
    return tuple(found)


def _percent(rest: float) -> str:
    return f"{100 * rest:.0f} %" if rest < 10 else "more than all"
