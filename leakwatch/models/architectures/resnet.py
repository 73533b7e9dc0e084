"""Residual networks: ResNet8, and ResNet18 and ResNet152 through torchvision."""

from __future__ import annotations

from typing import final

from jaxtyping import Float
from torch import Tensor, nn
from torchvision.models import resnet18, resnet152

from leakwatch.models.architectures.parts import (
    TorchvisionNet,
    checked_sizes,
    make_activation,
    with_channels,
)


@final
class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut (He et al. 2016, Fig. 2).

    Args:
        fan_in: Channels of the input.
        width: Channels of the output.
        stride: Of the first convolution and of the shortcut.
        activation: "relu", "sigmoid", "tanh" or "gelu".
    """

    def __init__(self, fan_in: int, width: int, stride: int, activation: str) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(fan_in, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            make_activation(activation),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or fan_in != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(fan_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )
        self.activation = make_activation(activation)

    def forward(
        self, x: Float[Tensor, "batch fan_in height width"]
    ) -> Float[Tensor, "batch fan_out out_height out_width"]:
        """Return features."""
        out: Tensor = self.activation(self.residual(x) + self.shortcut(x))
        return out


@final
class ResNet8(nn.Module):
    """Three stages of 16, 32 and 64 channels with one basic block each.

    The 6n+2 family of He et al., "Deep Residual Learning" (CVPR 2016), Section 4.2,
    at n = 1, with projection shortcuts: 78,042 parameters for 10 classes.

    Args:
        in_channels: Channels of the input image.
        num_classes: Number of logits.
        image_size: Side of a square image, or (height, width), in pixels; only
            checked, as the average pool takes any size.
        activation: "relu", "sigmoid", "tanh" or "gelu".

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is below 1, or the activation is not known.

    Example:
        >>> import torch
        >>> ResNet8()(torch.zeros(2, 3, 32, 32)).shape
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
        channels, classes, _, _ = checked_sizes(in_channels, num_classes, image_size)
        self.stem = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            make_activation(activation),
        )
        self.stages = nn.Sequential(
            BasicBlock(16, 16, 1, activation),
            BasicBlock(16, 32, 2, activation),
            BasicBlock(32, 64, 2, activation),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, classes)

    def forward(
        self, x: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch classes"]:
        """Return logits."""
        logits: Tensor = self.fc(self.pool(self.stages(self.stem(x))).flatten(1))
        return logits


@final
class ResNet18(TorchvisionNet):
    """torchvision's ResNet18, with the stem for 32×32 images unless told otherwise.

    In the small stem the 7×7 stride-2 convolution is 3×3 with stride 1 and the
    max-pool goes, as is the habit on CIFAR: 11,173,962 parameters for 10 classes.
    LAVP attacks the network on ImageNet, with its own stem. ReLUs don't work in
    place, so that backward hooks can be attached to any layer.

    Args:
        in_channels: Channels of the input image.
        num_classes: Number of logits.
        image_size: Side of a square image, or (height, width), in pixels; only
            checked, as the average pool takes any size.
        small_stem: The stem for 32×32 images; False: that for ImageNet.
        activation: "relu", "sigmoid", "tanh" or "gelu"; CI-Net attacks a network of
            sigmoids.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is below 1, or the activation is not known.
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 10,
        image_size: int | tuple[int, int] = 32,
        small_stem: bool = True,
        activation: str = "relu",
    ) -> None:
        channels, classes, _, _ = checked_sizes(in_channels, num_classes, image_size)
        net = resnet18(weights=None, num_classes=classes)
        other = make_activation(activation)
        if small_stem:
            net.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
            net.maxpool = nn.Identity()
        else:
            net.conv1 = with_channels(net.conv1, channels)
        _start(net.conv1)
        if activation != "relu":
            for part in [m for m in net.modules() if hasattr(m, "relu")]:
                part.relu = other
        super().__init__(net)


@final
class ResNet152(TorchvisionNet):
    """torchvision's ResNet152, untrained: 60,192,808 parameters for 1000 classes.

    He et al., "Deep Residual Learning" (CVPR 2016), Table 1; Zhang et al., "Inversion
    Influence Function" (NeurIPS 2023), Fig. 3, evaluate it on ImageNet. As in
    torchvision, bottlenecks take their stride in the 3×3 convolution. ReLUs don't
    work in place, so that backward hooks can be attached to any layer.

    Args:
        in_channels: Channels of the input image.
        num_classes: Number of logits.
        image_size: Side of a square image, or (height, width), in pixels; only
            checked, as the average pool takes any size.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is below 1.
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 1000,
        image_size: int | tuple[int, int] = 224,
    ) -> None:
        channels, classes, _, _ = checked_sizes(in_channels, num_classes, image_size)
        net = resnet152(weights=None, num_classes=classes)
        net.conv1 = with_channels(net.conv1, channels)
        _start(net.conv1)
        super().__init__(net)


def _start(stem: nn.Conv2d) -> None:
    # torchvision's own choice for its convolutions; a new stem needs it too
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
