"""The vision transformer that the surrogate-model attack (SME) was evaluated on."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from leakwatch.checks import check_integer
from leakwatch.models.architectures.parts import checked_sizes

_HEAD = 768


@final
class _Attention(nn.Module):
    """Multi-head self-attention whose queries, keys and values have no bias."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (width // heads) ** -0.5
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(
        self, x: Float[Tensor, "batch tokens width"]
    ) -> Float[Tensor, "batch tokens width"]:
        batch, tokens, _ = x.shape
        # Written out because fused attention has no second derivative.
        q, k, v = (
            part.reshape(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        weights = (q @ k.transpose(-2, -1) * self.scale).softmax(-1)
        mixed: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return mixed


@final
class _Block(nn.Module):
    """Attention and a perceptron; the first block has no norm and shortcut before."""

    def __init__(self, width: int, heads: int, *, first: bool) -> None:
        super().__init__()
        self.first = first
        self.norm: nn.Module = nn.Identity() if first else nn.LayerNorm(width)
        self.attention = _Attention(width, heads)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Linear(2 * width, width),
        )

    def forward(
        self, x: Float[Tensor, "batch tokens width"]
    ) -> Float[Tensor, "batch tokens width"]:
        mixed = self.attention(self.norm(x))
        x = mixed if self.first else x + mixed
        out: Tensor = x + self.perceptron(x)
        return out


@final
class SMEViT(nn.Module):
    """A vision transformer of Lu et al.'s type A: attention sees the bare tokens.

    Zhu, Yao and Blaschko, "Surrogate Model Extension" (ICML 2023), appendix G, after
    Lu et al., "APRIL: Finding the Achilles' Heel on Privacy for Vision Transformers"
    (2021). In type A the first block has neither a norm before its attention nor a
    shortcut around it, so that its weight gradients reveal the tokens in closed
    form. Width 384, 4 heads, 4 blocks with perceptrons of twice the width (GELU),
    no bias in queries, keys and values, class token and positions that start at
    zero; the class token passes a norm and a head of 768 hidden units (GELU).

    As published the patch is the whole image: one token beside the class token. The
    paper states no biases; here every other layer has one.

    Args:
        in_channels: Channels of the input image.
        num_classes: Number of logits.
        image_size: Side of a square image, or (height, width), in pixels.
        patch_size: Side of a square patch, in pixels, that divides the image's
            sides; None: the whole image.
        width: Length of a token, a multiple of `heads`.
        heads: Attention heads.
        depth: Blocks.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is below 1, patches don't fill the image, or heads don't
            share the width evenly.

    Example:
        >>> SMEViT(num_classes=62)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 62])
    """

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 10,
        image_size: int | tuple[int, int] = 28,
        patch_size: int | None = None,
        width: int = 384,
        heads: int = 4,
        depth: int = 4,
    ) -> None:
        super().__init__()
        channels, classes, *size = checked_sizes(in_channels, num_classes, image_size)
        patch = size[0], size[1]
        if patch_size is not None:
            patch = (check_integer("patch_size", patch_size),) * 2
        if size[0] % patch[0] or size[1] % patch[1]:
            raise ValueError(
                f"patch_size={patch_size} doesn't divide the image size "
                f"{size[0]}×{size[1]}; choose one that does, or patch_size=None."
            )
        width = check_integer("width", width)
        if width % check_integer("heads", heads):
            raise ValueError(
                f"heads must divide width, such as width=384, heads=4, got "
                f"width={width}, heads={heads}."
            )
        tokens = (size[0] // patch[0]) * (size[1] // patch[1])
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, tokens + 1, width))
        self.blocks = nn.Sequential(
            *(
                _Block(width, heads, first=i == 0)
                for i in range(check_integer("depth", depth))
            )
        )
        self.head = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, _HEAD),
            nn.GELU(),
            nn.Linear(_HEAD, classes),
        )

    def forward(
        self, x: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch classes"]:
        """Return logits."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(x), -1, -1), tokens], 1)
        logits: Tensor = self.head(self.blocks(tokens + self.positions)[:, 0])
        return logits
