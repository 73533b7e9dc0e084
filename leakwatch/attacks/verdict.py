"""Whether an attack matched the gradient, by one measure for all attacks."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leakwatch.attacks.pixels import PixelScale
from leakwatch.attacks.shared_gradient import SharedGradient
from leakwatch.attacks.start import Start
from leakwatch.derivatives import GradientMap
from leakwatch.status import OK, Status

__all__ = ["MATCHED", "matched_to", "mismatch", "uninformed", "verdict"]

#: A gradient counts as matched when the rest is at most this part of what images that
#: know nothing leave.
MATCHED = 0.1

# A direction that was matched by a gradient whose length is off by more than this part
# shows nothing: without biases any multiple of the image has that direction.
_LENGTH = 0.5

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


def uninformed(
    gradients: GradientMap,
    shared: SharedGradient,
    labels: Int[Tensor, "targets images"],
    pixels: PixelScale,
) -> tuple[Float[Tensor, " targets"], Float[Tensor, " targets"]]:
    """How far the gradients of images are that know nothing of the sample.

    Much of a gradient may not depend on the image at all: in a sigmoid LeNet any image
    with the right label comes within 15 %. Only the rest is there to be matched.

    Args:
        gradients: the map from samples to gradients.
        shared: the targets.
        labels: as the attacker has them.
        pixels: range of the images.

    Returns:
        The two measures of :func:`mismatch`, for uniform noise or a plain grey image,
        whichever is nearer.
    """
    size = {
        "targets": shared.targets,
        "images": shared.images,
        "shape": shared.sample_shape,
        "pixels": pixels,
        "index": shared.index,
        "dtype": gradients.dtype,
        "device": next(gradients.module.parameters()).device,
    }
    noise = Start.uniform().draw(**size)[0]  # type: ignore[arg-type]
    bounds = pixels.box(noise)
    middle = noise.new_tensor(0.5) if bounds is None else (bounds[0] + bounds[1]) / 2
    guesses = (noise, middle.expand(noise.shape).contiguous())
    found = [mismatch(gradients, shared, guess, labels) for guess in guesses]
    return (
        torch.minimum(found[0][0], found[1][0]),
        torch.minimum(found[0][1], found[1][1]),
    )


def matched_to(
    shared: SharedGradient, base: Float[Tensor, " targets"] | None = None
) -> Float[Tensor, " targets"]:
    """The relative rest up to which a gradient counts as matched.

    :data:`MATCHED` · min(1, base), and with noise of known size what that leaves at the
    true input: the root of the sum of that squared and (1.1 s √d_θ/‖g*‖)²; likewise
    with what a defense leaves there.

    Args:
        shared: the targets.
        base: what :func:`uninformed` images leave. Default: 1.

    Returns:
        ``(targets,)``, float64.
    """
    noise = limit_of_noise(shared)
    length = shared.gradient.double().norm(dim=1)
    part = MATCHED * _at_most_one(base, length)
    out: Tensor = (noise.square() + part.square()).sqrt()
    return out


def limit_of_noise(shared: SharedGradient) -> Float[Tensor, " targets"]:
    """What noise leaves at the true input, relative, with a tenth more, float64.

    s √d_θ/‖g*‖; or what a defense of any kind does leave, where that is known.
    """
    g = shared.gradient.double()
    length = g.norm(dim=1).clamp_min(torch.finfo(g.dtype).tiny)
    left = torch.full_like(length, shared.noise_std * math.sqrt(g.shape[1]))
    if shared.left is not None:
        left = torch.maximum(left, shared.left.to(left))
    found: Tensor = 1.1 * left / length
    return found


def _at_most_one(base: Tensor | None, like: Tensor) -> Tensor:
    return torch.ones_like(like) if base is None else base.to(like).clamp_max(1.0)


def verdict(
    shared: SharedGradient,
    relative: Float[Tensor, " targets"],
    *,
    base: Float[Tensor, " targets"] | None = None,
    whole: Float[Tensor, " targets"] | None = None,
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
        base: what :func:`uninformed` images leave of the same.
        whole: the rest with its length, ‖g − g*‖/‖g*‖, where ``relative`` is that of
            the direction.
        out_of_time: targets whose attacks were stopped by the clock.
        diverged: targets whose attacks all ended in values that are not finite.
        doubts: what else may have failed, such as inferred labels; empty for nothing.

    Returns:
        A status for each target: ``ok`` where the gradient was matched, ``estimated``
        where it was matched under a doubt.
    """
    length = shared.gradient.double().norm(dim=1)
    lengths, limit = length.tolist(), matched_to(shared, base).tolist()
    most = _at_most_one(base, length).tolist()
    untouched = shared.noise_std == 0 and shared.left is None
    enough = limit
    if shared.left is not None:
        # Under a large defense any image leaves little more than the sample itself: an
        # attack also has to come half of the way there from what knows nothing.
        half = (limit_of_noise(shared) / 1.1 + _at_most_one(base, length)) / 2
        enough = torch.minimum(matched_to(shared, base), half).tolist()
    noise = (limit_of_noise(shared) ** 2 + _LENGTH**2).sqrt()
    scaled = torch.zeros_like(length) if whole is None else whole.to(length)
    off = (scaled > noise).tolist()
    kind = str(shared.gradient.dtype).removeprefix("torch.")
    tiny = 1e3 * torch.finfo(shared.gradient.dtype).tiny
    found = []
    for i, rest in enumerate(relative.tolist()):
        doubt = f" {doubts[i]}" if doubts is not None and doubts[i] else ""
        late = out_of_time is not None and bool(out_of_time[i])
        broken = diverged is not None and bool(diverged[i])
        if lengths[i] == 0:
            found.append(Status("failed", "the shared gradient is zero."))
        elif lengths[i] < tiny:
            text = (
                f"the shared gradient is too small for {kind} to hold its digits; use "
                f"dtype=torch.float64."
            )
            found.append(Status("not converged", text + doubt))
        elif limit[i] >= most[i] and untouched:
            text = (
                "any image has this gradient: it says nothing about the sample that "
                "the label does not; the attack's assumption of an informative "
                "gradient fails."
            )
            found.append(Status("not converged", text + doubt))
        elif limit[i] >= most[i]:
            text = (
                "what was added to the gradient is as large as what it says about the "
                "image, so matching it proves nothing; the attack's assumption of an "
                "informative gradient fails."
            )
            found.append(Status("not converged", text + doubt))
        elif rest <= enough[i] and off[i]:
            text = (
                "the direction of the gradient was matched, but not its length, which "
                "this attack does not look at; try distance='l2' or gauss-newton."
            )
            found.append(Status("not converged", text + doubt))
        elif rest <= enough[i] and doubt:
            text = f"the gradient was matched, under an assumption.{doubt}"
            found.append(Status("estimated", text))
        elif rest <= enough[i]:
            found.append(OK)
        else:
            text = f"{_percent(rest)} of the gradient was not matched"
            if most[i] < 1:
                text += f", where noise or plain grey leaves {_percent(most[i])}"
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
    return f"{100 * rest:.2g} %" if rest < 1 else "all"
