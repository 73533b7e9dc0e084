from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt
import pytest

from leakwatch.reporting.html.png import data_uri, encode_png, thumbnail


def decode(data: bytes) -> npt.NDArray[np.uint8]:
    """Read unfiltered 8-bit PNG by the standard, checking every checksum."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place, chunks = 8, {}
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        kind = data[place + 4 : place + 8]
        body = data[place + 8 : place + 8 + length]
        (checksum,) = struct.unpack(
            ">I", data[place + 8 + length : place + 12 + length]
        )
        assert checksum == zlib.crc32(kind + body)
        chunks[kind] = body
        place += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, depth, colour, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, rest) == (8, [0, 0, 0])
    channels = {0: 1, 2: 3}[colour]
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8)
    lines = lines.reshape(height, 1 + width * channels)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, channels)


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 1), (7, 5, 3), (32, 32, 3)])
def test_pixels_come_back(shape: tuple[int, int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    np.testing.assert_array_equal(decode(encode_png(pixels)), pixels)
    assert data_uri(pixels).startswith("data:image/png;base64,iVBOR")


@pytest.mark.parametrize(
    "pixels",
    [np.zeros((2, 2, 2), np.uint8), np.zeros((2, 2, 3)), np.zeros((0, 2, 1), np.uint8)],
)
def test_other_arrays_raise(pixels: npt.NDArray[np.uint8]) -> None:
    with pytest.raises(ValueError, match="expected uint8 of shape"):
        encode_png(pixels)


def test_thumbnails_average_blocks() -> None:
    pixels = np.zeros((200, 100, 1), np.uint8)
    pixels[::3] = 90
    small = thumbnail(pixels, longest=67)
    assert small.shape == (66, 33, 1)
    assert set(np.unique(small)) == {30}
    assert thumbnail(pixels, longest=200) is pixels
    assert thumbnail(np.full((1, 500, 3), 7, np.uint8)).shape == (1, 83, 3)
