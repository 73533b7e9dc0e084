"""AlexNet for small images."""

from __future__ import annotations

from typing import final

from jaxtyping import Float
from torch import Tensor, nn

from leakwatch.models.architectures.parts import checked_sizes, make_activation

# fan-out, kernel, stride, padding, max-pool after it
_LAYERS = (
    (64, 11, 4, 5, True),
    (192, 5, 1, 2, True),
    (384, 3, 1, 1, False),
    (256, 3, 1, 1, False),
    (256, 3, 1, 1, True),
)


@final
class AlexNet(nn.Module):
    """Five convolutions and one fully connected layer, for 32×32 images.

    Krizhevsky, Sutskever and Hinton, "ImageNet Classification with Deep
    Convolutional Neural Networks", among the networks that LAVP attacks on CIFAR.
    LAVP doesn't publish its layout; this is the one in wide use on CIFAR: the
    convolutions of the single-column AlexNet with padding 5 in the first, 2×2
    max-pools, and the three fully connected layers replaced by one. For 10 classes
    it has 2,472,266 parameters. No local response normalisation and no dropout.

    Args:
        in_channels: Channels of the input image.
        num_classes: Number of logits.
        image_size: Side of a square image, or (height, width), in pixels; a side of
            at least 29, which the strides shrink 32-fold.
        activation: "relu" (the paper's), "sigmoid", "tanh" or "gelu".

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is too small, or the activation is not known.

    Example:
        >>> import torch
        >>> AlexNet()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 10,
        image_size: int | tuple[int, int] = 32,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        channels, classes, height, width = checked_sizes(
            in_channels, num_classes, image_size, network="AlexNet", least=29
        )
        height, width = (height - 1) // 4 + 1, (width - 1) // 4 + 1
        layers: list[nn.Module] = []
        for fan_out, kernel, stride, padding, pooled in _LAYERS:
            layers += [
                nn.Conv2d(channels, fan_out, kernel, stride, padding),
                make_activation(activation),
            ]
            channels = fan_out
            if pooled:
                layers.append(nn.MaxPool2d(2))
                height, width = height // 2, width // 2
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(channels * height * width, classes)

    def forward(
        self, x: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch classes"]:
        """Return logits."""
        logits: Tensor = self.fc(self.features(x).flatten(1))
        return logits
