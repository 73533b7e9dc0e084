"""A multilayer perceptron on flattened images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from jaxtyping import Float
from torch import Tensor, nn

from leakwatch.checks import check_integer
from leakwatch.models.architectures.parts import checked_sizes, make_activation


@final
class MLP(nn.Module):
    """Fully connected layers with one activation between neighbours.

    With no hidden layer it is the linear model of Zhang et al. (NeurIPS 2023),
    appendix C.1.

    Args:
        in_channels: Channels of the input image.
        num_classes: Number of logits.
        image_size: Side of a square image, or (height, width), in pixels.
        hidden_sizes: Width of each hidden layer, in order; may be empty.
        activation: "relu", "sigmoid", "tanh" or "gelu".

    Raises:
        TypeError: A size is not an integer, or `hidden_sizes` is not a sequence.
        ValueError: A size is below 1, or the activation is not known.

    Example:
        >>> import torch
        >>> MLP(hidden_sizes=(32,))(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 10,
        image_size: int | tuple[int, int] = 28,
        hidden_sizes: Sequence[int] = (256, 128),
        activation: str = "relu",
    ) -> None:
        super().__init__()
        if not isinstance(hidden_sizes, (list, tuple)):
            raise TypeError(
                "hidden_sizes must be a sequence of integers, such as "
                f"hidden_sizes=(256, 128), got {hidden_sizes!r}."
            )
        channels, classes, height, width = checked_sizes(
            in_channels, num_classes, image_size
        )
        fan_in = channels * height * width
        layers: list[nn.Module] = [nn.Flatten()]
        for size in hidden_sizes:
            layers += [
                nn.Linear(fan_in, check_integer("hidden_sizes", size)),
                make_activation(activation),
            ]
            fan_in = size
        layers.append(nn.Linear(fan_in, classes))
        self.layers = nn.Sequential(*layers)

    def forward(
        self, x: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch classes"]:
        """Return logits."""
        logits: Tensor = self.layers(x)
        return logits
