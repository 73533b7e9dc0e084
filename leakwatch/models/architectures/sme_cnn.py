"""The two small CNNs of federated reconstruction: for FEMNIST and for CIFAR-100."""

from __future__ import annotations

from typing import final

from jaxtyping import Float
from torch import Tensor, nn

from leakwatch.models.architectures.parts import checked_sizes, make_activation


class _SmallCNN(nn.Module):
    """Two 3×3 convolutions, each with an average pool, and two linear layers."""

    def __init__(
        self,
        name: str,
        widths: tuple[int, int, int],
        in_channels: int,
        num_classes: int,
        image_size: int | tuple[int, int],
        activation: str,
    ) -> None:
        super().__init__()
        first, second, hidden = widths
        channels, classes, height, width = checked_sizes(
            in_channels, num_classes, image_size, network=name, least=4
        )
        self.features = nn.Sequential(
            nn.Conv2d(channels, first, 3, padding=1),
            make_activation(activation),
            nn.AvgPool2d(2),
            nn.Conv2d(first, second, 3, padding=1),
            make_activation(activation),
            nn.AvgPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(second * (height // 4) * (width // 4), hidden),
            make_activation(activation),
            nn.Linear(hidden, classes),
        )

    def forward(
        self, x: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch classes"]:
        """Return logits."""
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


@final
class FEMNISTCNN(_SmallCNN):
    """Convolutions of 32 and 64 channels, then 100 hidden units; for FEMNIST.

    Dimitrov et al., "Data Leakage in Federated Averaging" (TMLR 2022), and Zhu, Yao
    and Blaschko, "Surrogate Model Extension" (ICML 2023), which share it: 3136
    features from 28×28 images, 338,778 parameters for 62 classes.

    The former is written in JAX and starts from LeCun-normal weights and zero
    biases; here PyTorch's own initialisation applies, as in the latter.

    Args:
        in_channels: Channels of the input image.
        num_classes: Number of logits.
        image_size: Side of a square image, or (height, width), in pixels; a side of
            at least 4.
        activation: "relu" (the papers'), "sigmoid", "tanh" or "gelu".

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is too small, or the activation is not known.

    Example:
        >>> import torch
        >>> FEMNISTCNN()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 62])
    """

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 62,
        image_size: int | tuple[int, int] = 28,
        activation: str = "relu",
    ) -> None:
        super().__init__(
            "FEMNISTCNN",
            (32, 64, 100),
            in_channels,
            num_classes,
            image_size,
            activation,
        )


@final
class CIFAR100CNN(_SmallCNN):
    """Convolutions of 64 and 128 channels, then 200 hidden units; for CIFAR-100.

    The wider sibling of `FEMNISTCNN`, from the same two papers: 8192 features from
    32×32 images, 1,734,348 parameters for 100 classes.

    Args:
        in_channels: Channels of the input image.
        num_classes: Number of logits.
        image_size: Side of a square image, or (height, width), in pixels; a side of
            at least 4.
        activation: "relu" (the papers'), "sigmoid", "tanh" or "gelu".

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is too small, or the activation is not known.

    Example:
        >>> import torch
        >>> CIFAR100CNN()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 100])
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 100,
        image_size: int | tuple[int, int] = 32,
        activation: str = "relu",
    ) -> None:
        super().__init__(
            "CIFAR100CNN",
            (64, 128, 200),
            in_channels,
            num_classes,
            image_size,
            activation,
        )
