"""ViT-B/16 through torchvision."""

from __future__ import annotations

from typing import final

from torchvision.models import vit_b_16

from leakwatch.models.architectures.parts import (
    TorchvisionNet,
    checked_sizes,
    with_channels,
)

_PATCH = 16


@final
class ViTB16(TorchvisionNet):
    """torchvision's ViT-B/16, untrained.

    Dosovitskiy et al., "An Image is Worth 16×16 Words" (ICLR 2021): width 768, 12
    heads, 12 blocks; 86,567,656 parameters for 1000 classes at 224×224.

    As in torchvision the last layer starts at zero, so that before the first step
    only that layer has a gradient. To probe the untrained network use
    `LitClassifier(..., initialization="xavier")`, which fills that layer too.

    Args:
        in_channels: Channels of the input image.
        num_classes: Number of logits.
        image_size: Side of a square image, in pixels: a multiple of 16.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is below 1, or the image isn't a square that patches of 16
            pixels fill.
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 1000,
        image_size: int | tuple[int, int] = 224,
    ) -> None:
        channels, classes, height, width = checked_sizes(
            in_channels, num_classes, image_size
        )
        if height != width or height % _PATCH:
            raise ValueError(
                "ViTB16 needs square images with a side that is a multiple of "
                f"{_PATCH}, such as image_size=224, got {height}×{width}."
            )
        net = vit_b_16(
            weights=None,
            num_classes=classes,
            image_size=height,
        )
        net.conv_proj = with_channels(net.conv_proj, channels)
        super().__init__(net)
