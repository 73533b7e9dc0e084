from __future__ import annotations

import base64
import io

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from leakwatch.reporting.html.markup import data_uri, thumbnail


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 1), (7, 5, 3), (32, 32, 3)])
def test_pixels_come_back(shape: tuple[int, int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    kind, _, content = data_uri(pixels).partition(",")
    assert kind == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(content))) as image:
        assert (image.format, image.mode) == ("PNG", "L" if shape[2] == 1 else "RGB")
        np.testing.assert_array_equal(np.asarray(image).reshape(shape), pixels)


@pytest.mark.parametrize(
    "pixels",
    [np.zeros((2, 2, 2), np.uint8), np.zeros((2, 2, 3)), np.zeros((0, 2, 1), np.uint8)],
)
def test_other_arrays_raise(pixels: npt.NDArray[np.uint8]) -> None:
    with pytest.raises(ValueError, match="expected uint8 of shape"):
        data_uri(pixels)


def test_thumbnails_average_blocks() -> None:
    pixels = np.zeros((200, 100, 1), np.uint8)
    pixels[::3] = 90
    small = thumbnail(pixels, longest=67)
    assert small.shape == (66, 33, 1)
    assert set(np.unique(small)) == {30}
    assert thumbnail(pixels, longest=200) is pixels
    assert thumbnail(np.full((1, 500, 3), 7, np.uint8)).shape == (1, 83, 3)
