"""The modified LeNet of the gradient-inversion papers."""

from __future__ import annotations

from typing import final

from jaxtyping import Float
from torch import Tensor, nn

from leakwatch.models.architectures.parts import (
    checked_sizes,
    make_activation,
)

_WIDTH = 12


@final
class LeNet(nn.Module):
    """Four 5×5 convolutions and one fully connected layer.

    Zhang et al., "Inversion Influence Function" (NeurIPS 2023), Table 1, where the
    strides, the padding and the activation are those of the authors' code: padding
    2, 12 channels throughout, strides 2, 2, 1, 1, an activation after each
    convolution. The flattened features are 588 numbers for 28×28 images and 768 for
    32×32, which is why every pixel reaches the shared gradient almost undiminished.

    Args:
        in_channels: Channels of the input image.
        num_classes: Number of logits.
        image_size: Side of a square image, or (height, width), in pixels.
        activation: "sigmoid" (the paper's), "tanh", "relu" or "gelu".

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is below 1, or the activation is not known.

    Example:
        >>> import torch
        >>> LeNet(in_channels=3, image_size=32)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 10,
        image_size: int | tuple[int, int] = 28,
        activation: str = "sigmoid",
    ) -> None:
        super().__init__()
        channels, classes, height, width = checked_sizes(
            in_channels, num_classes, image_size
        )
        layers: list[nn.Module] = []
        for stride in (2, 2, 1, 1):
            layers += [
                nn.Conv2d(channels, _WIDTH, 5, padding=2, stride=stride),
                make_activation(activation),
            ]
            channels = _WIDTH
            height, width = -(-height // stride), -(-width // stride)
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(_WIDTH * height * width, classes)

    def forward(
        self, x: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch classes"]:
        """Return logits."""
        logits: Tensor = self.fc(self.features(x).flatten(1))
        return logits
