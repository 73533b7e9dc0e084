from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from leakwatch.datamodules import ImageArrays, ImageDataset
from leakwatch.datamodules.dataset import RandomCropFlip

MEAN, STD = (0.5, 0.25), (0.5, 2.0)


def arrays() -> ImageArrays:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (5, 2, 6, 8), dtype=torch.uint8, generator=generator)
    return ImageArrays(images, torch.tensor([0, 1, 2, 1, 0]))


def test_items_are_normalised_pixels() -> None:
    data = ImageDataset(arrays(), MEAN, STD)
    x, y = data[3]
    pixels = arrays().images[3].double() / 255
    expected = torch.stack([(pixels[0] - 0.5) / 0.5, (pixels[1] - 0.25) / 2.0])
    torch.testing.assert_close(x, expected.float(), rtol=1e-6, atol=1e-7)
    assert (len(data), y, type(y)) == (5, 1, int)


def test_float_images_give_the_same_items() -> None:
    stored = arrays()
    floats = ImageArrays(stored.images.float() / 255, stored.labels)
    x, _ = ImageDataset(stored, MEAN, STD)[0]
    torch.testing.assert_close(
        ImageDataset(floats, MEAN, STD)[0][0], x, rtol=0.0, atol=0.0
    )


def test_targets_and_batches() -> None:
    data = ImageDataset(arrays(), MEAN, STD)
    assert data.targets.tolist() == [0, 1, 2, 1, 0]
    x, y = next(iter(DataLoader(data, batch_size=3)))
    assert (x.shape, x.dtype) == ((3, 2, 6, 8), torch.float32)
    assert (y.tolist(), y.dtype) == ([0, 1, 2], torch.int64)


def test_past_the_end_raises() -> None:
    with pytest.raises(IndexError):
        ImageDataset(arrays(), MEAN, STD)[5]


def test_augmentation_comes_before_normalisation() -> None:
    data = ImageDataset(arrays(), MEAN, STD, augment=torch.zeros_like)
    x, _ = data[0]
    torch.testing.assert_close(x[0], torch.full((6, 8), -1.0), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(x[1], torch.full((6, 8), -0.125), rtol=1e-6, atol=0.0)


def test_random_crop_flip_shifts_and_mirrors() -> None:
    torch.manual_seed(0)
    image = torch.arange(1, 49, dtype=torch.uint8).view(1, 6, 8)
    crop = RandomCropFlip(padding=1)
    border = torch.nn.functional.pad(image, (1, 1, 1, 1))
    allowed = set()
    for top in range(3):
        for left in range(3):
            window = border[:, top : top + 6, left : left + 8]
            allowed |= {bytes(window.flatten()), bytes(window.flip(-1).flatten())}
    assert len(allowed) == 18
    seen = set()
    for _ in range(300):
        out = crop(image)
        assert (out.shape, out.dtype) == (image.shape, image.dtype)
        seen.add(bytes(out.contiguous().flatten()))
    assert seen == allowed
