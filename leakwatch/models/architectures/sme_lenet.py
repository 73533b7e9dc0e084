"""The LeNet that the surrogate-model attack (SME) was evaluated on."""

from __future__ import annotations

from typing import final

from jaxtyping import Float
from torch import Tensor, nn

from leakwatch.models.architectures.parts import (
    checked_sizes,
    make_activation,
)


@final
class SMELeNet(nn.Module):
    """Two 5×5 convolutions with average pools and three fully connected layers.

    Zhu, Yao and Blaschko, "Surrogate Model Extension" (ICML 2023), appendix G:
    LeNet (LeCun et al. 1998) with tanh. Widths 6 and 16 without padding, average
    pools of 2×2 with stride 2 and padding 1, then 120, 84 and the classes; 400
    features from 28×28 images.

    Deviation: the published code applies softmax to the outputs and cross-entropy,
    which contains a softmax, to that. Here the outputs are logits, so that
    cross-entropy is what its name says; gradients, and so reconstructions, differ
    from those of the published code.

    Args:
        in_channels: Channels of the input image.
        num_classes: Number of logits.
        image_size: Side of a square image, or (height, width), in pixels; a side of
            at least 12.
        activation: "tanh" (the paper's), "sigmoid", "relu" or "gelu".

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is too small, or the activation is not known.

    Example:
        >>> import torch
        >>> SMELeNet(num_classes=62)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 62])
    """

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 10,
        image_size: int | tuple[int, int] = 28,
        activation: str = "tanh",
    ) -> None:
        super().__init__()
        channels, classes, height, width = checked_sizes(
            in_channels, num_classes, image_size, network="SMELeNet", least=12
        )
        layers: list[nn.Module] = []
        for fan_out in (6, 16):
            layers += [
                nn.Conv2d(channels, fan_out, 5),
                make_activation(activation),
                # the border of zeros takes part in the averages, as published
                nn.AvgPool2d(2, stride=2, padding=1),
            ]
            channels = fan_out
            height, width = (height - 4) // 2 + 1, (width - 4) // 2 + 1
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(channels * height * width, 120),
            make_activation(activation),
            nn.Linear(120, 84),
            make_activation(activation),
            nn.Linear(84, classes),
        )

    def forward(
        self, x: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch classes"]:
        """Return logits."""
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits
