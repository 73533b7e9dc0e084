"""Logistic regression: the model whose gradient is the image, scaled."""

from __future__ import annotations

from typing import final

from jaxtyping import Float
from torch import Tensor, nn

from leakwatch.models.architectures.parts import checked_sizes


@final
class LinearClassifier(nn.Module):
    """One matrix from the flattened image to the logits.

    The linear model of Zhang et al., "Inversion Influence Function" (NeurIPS 2023),
    appendix C.1: "a matrix that maps the input data into a vector". Its weight
    gradient is (softmax − one-hot) ⊗ x, so a single sample can be read off it by one
    division; the scores have closed forms.

    The paper doesn't say whether there is a bias. Here there is one, as in logistic
    regression; `bias=False` gives the bare matrix.

    Args:
        in_channels: Channels of the input image.
        num_classes: Number of logits.
        image_size: Side of a square image, or (height, width), in pixels.
        bias: Add a bias to each logit.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is below 1.

    Example:
        >>> sum(p.numel() for p in LinearClassifier().parameters())
        7850
    """

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 10,
        image_size: int | tuple[int, int] = 28,
        bias: bool = True,
    ) -> None:
        super().__init__()
        channels, classes, height, width = checked_sizes(
            in_channels, num_classes, image_size
        )
        self.fc = nn.Linear(channels * height * width, classes, bias=bias)

    def forward(
        self, x: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch classes"]:
        """Return logits."""
        logits: Tensor = self.fc(x.flatten(1))
        return logits
