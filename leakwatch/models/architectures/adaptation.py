"""What torchvision's networks need before they are probed or see other images."""

from __future__ import annotations

from torch import nn


def out_of_place(net: nn.Module) -> None:
    """Make activations write into fresh tensors, as backward hooks require.

    Args:
        net: Changed in place.

    Example:
        >>> net = nn.Sequential(nn.ReLU(inplace=True))
        >>> out_of_place(net)
        >>> net[0].inplace
        False
    """
    for module in net.modules():
        if isinstance(module, (nn.ReLU, nn.ReLU6, nn.Hardswish, nn.SiLU)):
            module.inplace = False


def with_channels(conv: nn.Conv2d, in_channels: int) -> nn.Conv2d:
    """Return a first convolution for images with another number of channels.

    Args:
        conv: The network's own, of one group; returned when it fits already.
        in_channels: Channels of the images.

    Example:
        >>> with_channels(nn.Conv2d(3, 8, 3, padding=1, bias=False), 1)
        Conv2d(1, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)
    """
    if conv.in_channels == in_channels:
        return conv
    return nn.Conv2d(
        in_channels,
        conv.out_channels,
        conv.kernel_size,  # type: ignore[arg-type]
        conv.stride,  # type: ignore[arg-type]
        conv.padding,  # type: ignore[arg-type]
        bias=conv.bias is not None,
    )
