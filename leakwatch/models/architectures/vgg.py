"""VGG9 for small images."""

from __future__ import annotations

from typing import final

from jaxtyping import Float
from torch import Tensor, nn

from leakwatch.models.architectures.parts import (
    checked_sizes,
    make_activation,
)

_STAGES = ((32, 64), (128, 128), (256, 256))
_HIDDEN = 512


@final
class VGG9(nn.Module):
    """Six 3×3 convolutions in three stages and three fully connected layers.

    In the style of Simonyan and Zisserman, "Very Deep Convolutional Networks"
    (2014), whose smallest network has eleven layers; LAVP attacks a VGG9 on CIFAR
    but doesn't publish its layout. This is the one that federated-learning work
    uses: widths 32, 64 | 128, 128 | 256, 256 with a 2×2 max-pool after each stage,
    then 512, 512 and the classes; 3,491,530 parameters for 10 classes at 32×32.
    Without the dropout that is used there in training.

    Args:
        in_channels: Channels of the input image.
        num_classes: Number of logits.
        image_size: Side of a square image, or (height, width), in pixels; a side of
            at least 8, which the pools shrink 8-fold.
        activation: "relu" (the paper's), "sigmoid", "tanh" or "gelu".
        batch_norm: BatchNorm after each convolution, which then has no bias.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is too small, or the activation is not known.

    Example:
        >>> import torch
        >>> VGG9()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 10,
        image_size: int | tuple[int, int] = 32,
        activation: str = "relu",
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        channels, classes, height, width = checked_sizes(
            in_channels, num_classes, image_size, network="VGG9", least=8
        )
        layers: list[nn.Module] = []
        for stage in _STAGES:
            for fan_out in stage:
                layers.append(
                    nn.Conv2d(channels, fan_out, 3, padding=1, bias=not batch_norm)
                )
                if batch_norm:
                    layers.append(nn.BatchNorm2d(fan_out))
                layers.append(make_activation(activation))
                channels = fan_out
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(channels * (height // 8) * (width // 8), _HIDDEN),
            make_activation(activation),
            nn.Linear(_HIDDEN, _HIDDEN),
            make_activation(activation),
            nn.Linear(_HIDDEN, classes),
        )

    def forward(
        self, x: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch classes"]:
        """Return logits."""
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits
