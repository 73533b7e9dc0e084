"""LPIPS with three networks, never with weights that are not the trained ones."""

from __future__ import annotations

import importlib
import math
import warnings
from functools import cache
from pathlib import Path
from typing import Final, Literal, TypeAlias

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from leakwatch.derivatives.runtime.chunking import in_chunks
from leakwatch.derivatives.runtime.rng_and_precision import (
    isolated_rng,
    plain_arithmetic,
)
from leakwatch.status import OK, Status

__all__ = ["LpipsNet", "LpipsUnavailableError", "lpips", "lpips_network"]

LpipsNet: TypeAlias = Literal["vgg", "alex", "squeeze"]

_WEIGHTS: Final[dict[str, tuple[str, str]]] = {
    "vgg": ("VGG16_Weights", "vgg16"),
    "alex": ("AlexNet_Weights", "alexnet"),
    "squeeze": ("SqueezeNet1_1_Weights", "squeezenet1_1"),
}
_SMALLEST: Final = 32
_CHUNK: Final = 32


class LpipsUnavailableError(RuntimeError):
    """LPIPS can't be computed here, and what to do about it."""


def lpips_network(net: LpipsNet, download: bool = False) -> nn.Module:
    """The network of the package ``lpips``, float32 on the CPU, in eval mode.

    Random streams are left as they were. A network that was found is kept.

    Args:
        net: ``"vgg"``, ``"alex"`` or ``"squeeze"``.
        download: fetch missing backbone weights (VGG16: 528 MB, AlexNet: 233 MB,
            SqueezeNet: 5 MB).

    Raises:
        LpipsUnavailableError: if the package or the weights are missing or broken.
    """
    file = weights_file(net)
    if not file.is_file() and not download:
        raise LpipsUnavailableError(
            f"the weights of its backbone are missing: put {file.name} into "
            f"{file.parent} (TORCH_HOME decides where), or allow the download"
        )
    try:
        return _load(net, file)
    except LpipsUnavailableError:
        raise
    # Broken archives, no network, no disk: many types, one consequence.
    except Exception as error:
        raise LpipsUnavailableError(
            f"its weights in {file} can't be loaded ({type(error).__name__}); delete "
            f"that file and fetch it again"
        ) from error


def weights_file(net: LpipsNet) -> Path:
    """Where torchvision keeps the weights of the backbone, there or not."""
    models = importlib.import_module("torchvision.models")
    weights = getattr(models, _WEIGHTS[net][0]).IMAGENET1K_V1
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    return folder / str(weights.url).rsplit("/", 1)[-1]


@cache
def _load(net: LpipsNet, file: Path) -> nn.Module:
    with warnings.catch_warnings(), isolated_rng(), torch.inference_mode(False):
        # torchvision's notes on the arguments that lpips uses are not for our users.
        warnings.simplefilter("ignore")
        try:
            package = importlib.import_module("lpips")
        except ImportError as error:
            raise LpipsUnavailableError(
                "the package lpips is not installed: pip install lpips"
            ) from error
        network: nn.Module = package.LPIPS(net=net, verbose=False).float().eval()
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    _check_network(network)
    return network


def _check_network(network: nn.Module) -> None:
    """Raises unless equal images are at distance 0 and noise is further than that."""
    ramp = torch.linspace(-1, 1, 64).expand(1, 3, 64, 64)
    with torch.no_grad():
        same, other = float(network(ramp, ramp)), float(network(ramp, -ramp.mT))
    if same != 0.0 or not 1e-3 < other < math.inf:
        raise LpipsUnavailableError(
            f"its weights are not the trained ones: equal images are at distance "
            f"{same:.2g}, unequal ones at {other:.2g}"
        )


def lpips(
    images: Float64[Tensor, "n channels height width"],
    originals: Float64[Tensor, "n channels height width"],
    data_range: float,
    net: LpipsNet,
    *,
    low: float = 0.0,
    download: bool = False,
) -> tuple[Float64[Tensor, " n"], Status]:
    """Learned perceptual distance, version 0.1, in float32.

    Pixels are mapped from [low, low + data_range] to [−1, 1]; grey images stand for
    three equal channels; images with a side below 32 pixels, which the networks can't
    take or hardly see, are enlarged (bilinear) until the shorter side has 32.

    Args:
        images: reconstructions.
        originals: what they should show.
        data_range: peak of the pixels.
        net: which network.
        low: the darkest value.
        download: see :func:`lpips_network`.

    Returns:
        Values from 0 (equal) on, and one status for all: ``estimated`` for enlarged
        images, ``undefined`` for other channel counts than 1 and 3.

    Raises:
        LpipsUnavailableError: if the package or the weights are missing or broken.
    """
    network = lpips_network(net, download)
    channels, (height, width) = images.shape[1], images.shape[-2:]
    if channels not in (1, 3):
        reason = f"LPIPS is for 1 or 3 channels, these images have {channels}"
        return images.new_full((len(images),), math.nan), Status("undefined", reason)
    side = min(height, width)
    scale = max(1.0, _SMALLEST / side)
    size = (math.ceil(height * scale), math.ceil(width * scale))

    def prepared(x: Tensor) -> Tensor:
        x = (2 * (x - low) / data_range - 1).float().cpu()
        x = x.expand(-1, 3, -1, -1)
        if scale > 1:
            x = nn.functional.interpolate(
                x, size=size, mode="bilinear", align_corners=False
            )
        return x

    def chunk(a: Tensor, b: Tensor) -> Tensor:
        value: Tensor = network(prepared(a), prepared(b))
        return value.reshape(len(a)).double()

    with plain_arithmetic("cpu"), torch.no_grad():
        values = in_chunks(chunk, (images, originals), _CHUNK)
    if scale == 1:
        return values, OK
    return values, Status(
        "estimated", f"images of {side} pixels a side were enlarged to {_SMALLEST}"
    )
