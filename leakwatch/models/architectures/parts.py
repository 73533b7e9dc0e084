"""What several architectures share: sizes, activations, first convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxtyping import Float
from torch import Tensor, nn

from leakwatch.checks import check_integer

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
}


def make_activation(name: str) -> nn.Module:
    """Return a fresh activation module.

    Args:
        name: One of `ACTIVATIONS`. Sigmoid, tanh and GELU are smooth, so that the
            gradient has a derivative everywhere; ReLU has kinks, where it has none.

    Raises:
        ValueError: `name` is not known; the message lists those that are.

    Example:
        >>> make_activation("sigmoid")
        Sigmoid()
    """
    if name not in ACTIVATIONS:
        raise ValueError(
            f"Unknown activation {name!r}; known: {', '.join(sorted(ACTIVATIONS))}."
        )
    return ACTIVATIONS[name]()


def checked_sizes(
    in_channels: object,
    num_classes: object,
    image_size: object,
    *,
    network: str = "",
    least: int = 1,
) -> tuple[int, int, int, int]:
    """Channels, classes, height and width, as every architecture takes them.

    Args:
        in_channels: Channels of the input image.
        num_classes: Number of logits.
        image_size: One integer, or a sequence (height, width), in pixels.
        network: Its name, for the error text.
        least: Smallest side that its strides don't shrink to nothing.

    Raises:
        TypeError: A size is not an integer, or `image_size` no pair of them.
        ValueError: A size is below 1, or a side below `least`.

    Example:
        >>> checked_sizes(3, 10, 28), checked_sizes(1, 10, [32, 48])
        ((3, 10, 28, 28), (1, 10, 32, 48))
    """
    channels = check_integer("in_channels", in_channels)
    classes = check_integer("num_classes", num_classes, example=10)
    sides = (image_size, image_size)
    if isinstance(image_size, Sequence) and not isinstance(image_size, str):
        if len(image_size) != 2:
            raise TypeError(
                "image_size must be one integer or (height, width), such as "
                f"image_size=28 or image_size=(32, 48), got {image_size!r}."
            )
        sides = tuple(image_size)
    height, width = (check_integer("image_size", s, example=28) for s in sides)
    if min(height, width) < least:
        raise ValueError(
            f"{network} needs images of at least {least}×{least} pixels, got "
            f"image_size={height}×{width}; resize them, or take a network with fewer "
            "strides, such as 'lenet' or 'resnet8'."
        )
    return channels, classes, height, width


class TorchvisionNet(nn.Module):
    """A network of torchvision's, whose activations write into fresh tensors.

    Args:
        net: The network, of which `forward(x)` gives logits; changed in place.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        out_of_place(net)
        self.net = net

    def forward(
        self, x: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch classes"]:
        """Return logits."""
        logits: Tensor = self.net(x)
        return logits


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
