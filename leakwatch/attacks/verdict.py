"""Whether an attack matched the gradient, by one measure for all attacks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from leakwatch.attacks.pixels import PixelScale
from leakwatch.attacks.shared_gradient import SharedGradient
from leakwatch.attacks.start import Start
from leakwatch.derivatives import GradientMap
from leakwatch.status import OK, Status

__all__ = [
    "EXPLAINED",
    "MATCHED",
    "matched_to",
    "mismatch",
    "noise_and_grey",
    "uninformed",
    "verdict",
]

#: A gradient without noise counts as matched when the rest is at most this part of its
#: length: about what noise leaves that hides next to nothing. Images that leave a tenth
#: of what a grey image leaves were seen at 11 to 17 dB.
MATCHED = 1e-3
# Where images that know nothing leave little, at most this part of that.
_OF_NOTHING = 0.02
#: The same for an update of many steps, which is never quite the gradient that an
#: attack takes it for.
EXPLAINED = 0.1
# Rounding of a gradient, in units of its precision.
_ROUNDING = 20.0

# A direction that was matched by a gradient whose length is off by more than this part
# shows nothing: without biases any multiple of the image has that direction.
_LENGTH = 0.5

_CHUNK = 32


def mismatch(
    gradients: GradientMap,
    shared: SharedGradient,
    images: Float[Tensor, "targets images ..."],
    labels: Shaped[Tensor, "targets images ..."],
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
    measured = []
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
        measured.append(torch.stack([relative, turned]))
    relative, turned = torch.nan_to_num(
        torch.cat(measured, 1), nan=math.inf, posinf=math.inf
    )
    return relative, turned


def uninformed(
    gradients: GradientMap,
    shared: SharedGradient,
    labels: Shaped[Tensor, "targets images ..."],
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
    guesses = noise_and_grey(
        (shared.targets, shared.images, *shared.sample_shape),
        pixels,
        shared.index,
        dtype=gradients.dtype,
        device=next(gradients.module.parameters()).device,
    )
    measured = [mismatch(gradients, shared, guess, labels) for guess in guesses]
    relative, turned = (torch.minimum(*pair) for pair in zip(*measured, strict=True))
    return relative, turned


def noise_and_grey(
    size: tuple[int, ...],
    pixels: PixelScale,
    index: Sequence[int] | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Float[Tensor, "targets images ..."], Float[Tensor, "targets images ..."]]:
    """Images that know nothing: uniform noise, and the middle of the range.

    Args:
        size: targets, images of each, and the shape of a sample.
        pixels: range of the images.
        index: what names each target's random stream.
        dtype: of the images.
        device: of the images.
    """
    noise = Start.uniform().draw(
        targets=size[0],
        images=size[1],
        shape=size[2:],
        pixels=pixels,
        index=index,
        dtype=dtype,
        device=device,
    )[0]
    bounds = pixels.box(noise)
    middle = noise.new_tensor(0.5) if bounds is None else (bounds[0] + bounds[1]) / 2
    return noise, middle.expand(noise.shape).contiguous()


def matched_to(
    shared: SharedGradient,
    base: Float[Tensor, " targets"] | None = None,
    part: float = MATCHED,
) -> Float[Tensor, " targets"]:
    """The relative rest up to which a gradient counts as matched.

    ``part``, a fiftieth of base where that is less, but not less than rounding; and
    with noise of known size what that leaves at the true input: the root of the sum of
    that squared and (1.1 s √d_θ/‖g*‖)²; likewise with what a defense leaves there.

    Args:
        shared: the targets.
        base: what :func:`uninformed` images leave. Default: 1.
        part: :data:`MATCHED`, or :data:`EXPLAINED` of an update.

    Returns:
        ``(targets,)``, float64.
    """
    noise = limit_of_noise(shared)
    length = shared.gradient.double().norm(dim=1)
    rounding = _ROUNDING * torch.finfo(shared.gradient.dtype).eps
    least = _at_most_one(base, length)
    # An update's attacks explain a part of what grey images leave.
    rest = part * least if part >= EXPLAINED else (_OF_NOTHING * least).clamp_max(part)
    rest = rest.clamp_min(rounding)
    out: Tensor = (noise.square() + rest.square()).sqrt()
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
    limit: Tensor = 1.1 * left / length
    return limit


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
    part: float = MATCHED,
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
        part: as for :func:`matched_to`.

    Returns:
        A status for each target: ``ok`` where the gradient was matched, ``estimated``
        where it was matched under a doubt.
    """
    length = shared.gradient.double().norm(dim=1)
    lengths, limit = length.tolist(), matched_to(shared, base, part).tolist()
    most = _at_most_one(base, length).tolist()
    untouched = shared.noise_std == 0 and shared.left is None
    enough = limit
    if shared.left is not None:
        # Under a large defense any image leaves little more than the sample itself: an
        # attack also has to come half of the way there from what knows nothing.
        half = (limit_of_noise(shared) / 1.1 + _at_most_one(base, length)) / 2
        enough = torch.minimum(matched_to(shared, base, part), half).tolist()
    noise = (limit_of_noise(shared) ** 2 + _LENGTH**2).sqrt()
    scaled = torch.zeros_like(length) if whole is None else whole.to(length)
    off = (scaled > noise).tolist()
    kind = str(shared.gradient.dtype).removeprefix("torch.")
    tiny = 1e3 * torch.finfo(shared.gradient.dtype).tiny
    statuses = []
    for i, rest in enumerate(relative.tolist()):
        doubt = f" {doubts[i]}" if doubts is not None and doubts[i] else ""
        why_not = ""
        if lengths[i] < tiny:
            why_not = (
                f"the shared gradient is too small for {kind} to hold its digits"
                f"{'' if kind == 'float64' else '; use dtype=torch.float64'}."
            )
        elif limit[i] >= most[i] and untouched:
            why_not = (
                "any image has this gradient: it says nothing about the sample that "
                "the label does not; the attack's assumption of an informative "
                "gradient fails."
            )
        elif limit[i] >= most[i]:
            why_not = (
                "what was added to the gradient is as large as what it says about the "
                "image, so matching it proves nothing; the attack's assumption of an "
                "informative gradient fails."
            )
        elif rest <= enough[i] and off[i]:
            why_not = (
                "the direction of the gradient was matched, but not its length, which "
                "this attack does not look at; try distance='l2' or gauss-newton."
            )
        elif not rest <= enough[i]:
            why_not = f"{_percent(rest)} of the gradient was not matched"
            if most[i] < 1:
                why_not += f", where noise or plain grey leaves {_percent(most[i])}"
            if out_of_time is not None and bool(out_of_time[i]):
                why_not += " when time was over; allow more."
            elif diverged is not None and bool(diverged[i]):
                why_not += ": the objective left the finite numbers; use a smaller lr."
            else:
                why_not += (
                    "; the optimiser ended in another minimum or needs more steps or "
                    "restarts."
                )
        if lengths[i] == 0:
            statuses.append(Status("failed", "the shared gradient is zero."))
        elif why_not:
            statuses.append(Status("not converged", why_not + doubt))
        elif doubt:
            text = f"the gradient was matched, under an assumption.{doubt}"
            statuses.append(Status("estimated", text))
        else:
            statuses.append(OK)
    return tuple(statuses)


def _percent(rest: float) -> str:
    return f"{100 * rest:.2g} %" if rest < 1 else "all"
