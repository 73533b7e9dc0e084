"""The ResNet8 that the surrogate-model attack (SME) was evaluated on."""

from __future__ import annotations

from typing import final

from jaxtyping import Float
from torch import Tensor, nn

from leakwatch.models.architectures.parts import checked_sizes, make_activation
from leakwatch.models.architectures.resnet import BasicBlock

_HIDDEN = 1000


@final
class SMEResNet8(nn.Module):
    """Three basic blocks of 32, 64 and 128 channels and two fully connected layers.

    Zhu, Yao and Blaschko, "Surrogate Model Extension" (ICML 2023), appendix G: "a
    relatively small ResNet8 with three building blocks". Strides 1, 2, 2, an average
    pool of 2×2 with stride 2 and padding 1 that leaves 2048 features of 28×28 images,
    then 1000 units and the classes with no activation between. The running statistics
    of BatchNorm are frozen there: clients train in eval mode.

    It is wider than `ResNet8`, the network of the 6n+2 family: 2,417,846 parameters
    for 62 classes, where that has 78,042 for 10. Convolutions have no bias, which
    BatchNorm would take the place of.

    Args:
        in_channels: Channels of the input image.
        num_classes: Number of logits.
        image_size: Side of a square image, or (height, width), in pixels.
        activation: "relu" (the paper's), "sigmoid", "tanh" or "gelu".

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is below 1, or the activation is not known.

    Example:
        >>> import torch
        >>> SMEResNet8(num_classes=62)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 62])
    """

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 10,
        image_size: int | tuple[int, int] = 28,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        channels, classes, height, width = checked_sizes(
            in_channels, num_classes, image_size
        )
        # Each block of stride 2 rounds up, and the padded pool adds one position.
        height, width = (-(-n // 4) // 2 + 1 for n in (height, width))
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            make_activation(activation),
            BasicBlock(32, 32, 1, activation),
            BasicBlock(32, 64, 2, activation),
            BasicBlock(64, 128, 2, activation),
            # the border of zeros takes part in the averages, as published
            nn.AvgPool2d(2, stride=2, padding=1),
        )
        self.classifier = nn.Sequential(
            nn.Linear(128 * height * width, _HIDDEN),
            nn.Linear(_HIDDEN, classes),
        )

    def forward(
        self, x: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch classes"]:
        """Return logits."""
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits
