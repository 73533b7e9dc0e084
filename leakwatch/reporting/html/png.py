"""A PNG encoder for small pictures, so that a report needs no imaging library."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
import numpy.typing as npt


def encode_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    r"""Return the PNG file of one picture (ISO/IEC 15948), grey or RGB, 8 bits.

    Args:
        pixels: Shape (height, width, channels) with 1 or 3 channels, uint8.

    Raises:
        ValueError: If the shape or the type is another.

    Example:
        >>> encode_png(np.zeros((2, 3, 1), np.uint8))[:4]
        b'\x89PNG'
    """
    pixels = np.asarray(pixels)
    if (
        pixels.dtype != np.uint8
        or pixels.ndim != 3
        or pixels.shape[2] not in (1, 3)
        or 0 in pixels.shape
    ):
        raise ValueError(
            f"picture is {pixels.dtype} of shape {pixels.shape}, expected uint8 of "
            "shape (height, width, 1 or 3)"
        )
    height, width, channels = pixels.shape
    lines = np.zeros((height, 1 + width * channels), np.uint8)
    lines[:, 1:] = pixels.reshape(height, -1)
    colour_type = 0 if channels == 1 else 2
    header = struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0)
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            _chunk(b"IHDR", header),
            _chunk(b"IDAT", zlib.compress(lines.tobytes(), 6)),
            _chunk(b"IEND", b""),
        )
    )


def thumbnail(
    pixels: npt.NDArray[np.uint8], longest: int = 96
) -> npt.NDArray[np.uint8]:
    """Shrink a picture by a whole factor to at most ``longest`` pixels a side.

    Blocks are averaged; a remainder at the right and lower edge is cut off.
    Smaller pictures come back as they are.
    """
    factor = -(-max(pixels.shape[:2]) // longest)
    if factor <= 1:
        return pixels
    height, width = (max(side // factor, 1) for side in pixels.shape[:2])
    tall, wide = (min(factor, side) for side in pixels.shape[:2])
    cut = pixels[: height * tall, : width * wide].astype(np.float64)
    blocks = cut.reshape(height, tall, width, wide, pixels.shape[2])
    small: npt.NDArray[np.uint8] = np.rint(blocks.mean(axis=(1, 3))).astype(np.uint8)
    return small


def data_uri(pixels: npt.NDArray[np.uint8]) -> str:
    """Return a ``data:image/png`` address that holds the picture itself."""
    return "data:image/png;base64," + base64.b64encode(encode_png(pixels)).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    body = kind + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))
