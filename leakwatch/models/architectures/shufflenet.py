"""ShuffleNetV2 through torchvision."""

from __future__ import annotations

from typing import final

from torch import nn
from torchvision import models

from leakwatch.models.architectures.parts import (
    TorchvisionNet,
    checked_sizes,
    with_channels,
)

_BUILDERS = {
    0.5: models.shufflenet_v2_x0_5,
    1.0: models.shufflenet_v2_x1_0,
    1.5: models.shufflenet_v2_x1_5,
    2.0: models.shufflenet_v2_x2_0,
}


@final
class ShuffleNetV2(TorchvisionNet):
    """torchvision's ShuffleNetV2, with a stem for 32×32 images as an option.

    Ma et al., "ShuffleNet V2" (ECCV 2018); LAVP attacks it on ImageNet without
    saying at which width. With the small stem the first convolution has stride 1 and
    the max-pool goes, which leaves 4×4 features of a 32×32 image instead of one.
    ReLUs don't work in place, so that backward hooks can be attached to any layer.

    Args:
        in_channels: Channels of the input image.
        num_classes: Number of logits.
        image_size: Side of a square image, or (height, width), in pixels; only
            checked, as the average pool takes any size.
        width: 0.5, 1.0, 1.5 or 2.0 times the channels of the base network.
        small_stem: The stem for 32×32 images; False: that for ImageNet.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is below 1, or there is no such width.
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 10,
        image_size: int | tuple[int, int] = 32,
        width: float = 1.0,
        small_stem: bool = True,
    ) -> None:
        channels, classes, _, _ = checked_sizes(in_channels, num_classes, image_size)
        if width not in _BUILDERS:
            raise ValueError(f"width must be 0.5, 1.0, 1.5 or 2.0, got {width!r}.")
        net = _BUILDERS[width](weights=None, num_classes=classes)
        net.conv1[0] = with_channels(net.conv1[0], channels)
        if small_stem:
            net.conv1[0].stride = (1, 1)
            net.maxpool = nn.Identity()
        super().__init__(net)
