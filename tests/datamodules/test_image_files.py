from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as VF

from leakwatch.datamodules import ImageFileDataset, ImageFiles

PLAIN = ((0.0,) * 3, (1.0,) * 3)


def pixels(height: int, width: int, channels: int = 3) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(0)
    return generator.integers(0, 256, (height, width, channels), np.uint8).squeeze()


def saved(path: Path, array: np.ndarray[Any, Any], **kwargs: Any) -> ImageFiles:
    Image.fromarray(array).save(path)
    return ImageFiles((str(path),), torch.tensor([1]), **{"image_size": 8, **kwargs})


def test_an_image_of_the_right_size_stays_what_it_is(tmp_path: Path) -> None:
    array = pixels(8, 8)
    files = saved(tmp_path / "a.png", array)
    x, y = files.dataset((0.5, 0.25, 0.1), (0.5, 2.0, 0.3))[0]
    expected = torch.from_numpy(array).permute(2, 0, 1).double() / 255
    mean = torch.tensor([0.5, 0.25, 0.1], dtype=torch.float64).view(3, 1, 1)
    std = torch.tensor([0.5, 2.0, 0.3], dtype=torch.float64).view(3, 1, 1)
    torch.testing.assert_close(
        x, ((expected - mean) / std).float(), rtol=1e-5, atol=1e-6
    )
    assert (y, type(y), x.dtype) == (1, int, torch.float32)


def test_the_central_square_is_resized(tmp_path: Path) -> None:
    files = saved(tmp_path / "a.png", pixels(40, 90))
    (found, _) = ImageFileDataset(files, *PLAIN)[0]
    central = Image.open(tmp_path / "a.png").crop((25, 0, 65, 40))
    expected = VF.to_tensor(VF.resize(central, [8, 8]))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(("height", "width", "levels"), [(320, 256, 0), (375, 500, 6)])
def test_the_cut_for_imagenet_is_the_customary_one(
    height: int, width: int, levels: int, tmp_path: Path
) -> None:
    smooth = np.outer(np.hanning(height), np.hanning(width))[..., None] * [255, 128, 64]
    files = saved(
        tmp_path / "a.png", smooth.astype(np.uint8), image_size=224, crop=0.875
    )
    (found, _) = ImageFileDataset(files, *PLAIN)[0]
    resized = VF.resize(Image.open(tmp_path / "a.png"), [256])
    expected = VF.to_tensor(VF.center_crop(resized, [224, 224]))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=(levels + 0.01) / 255)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_kind_of_8_bits(mode: str, channels: int, tmp_path: Path) -> None:
    path = tmp_path / "a.tif" if mode in ("CMYK", "YCbCr") else tmp_path / "a.png"
    Image.fromarray(np.full((8, 8), 255, np.uint8)).convert("RGB").convert(mode).save(
        path
    )
    try:
        with Image.open(path) as written:
            written.load()
    except OSError:
        pytest.skip("this version of Pillow can't read what it wrote")
    files = ImageFiles((str(path),), torch.tensor([0]), 8, channels)
    x, _ = files.dataset((0.0,) * channels, (1.0,) * channels)[0]
    torch.testing.assert_close(x, torch.ones(channels, 8, 8), rtol=0.0, atol=2 / 255)


def test_transparent_palette_raises_no_warning(tmp_path: Path) -> None:
    image = Image.new("P", (8, 8))
    image.putpalette([0, 0, 0, 255, 255, 255])
    image.save(tmp_path / "a.png", transparency=bytes([0, 128]))
    files = ImageFiles((str(tmp_path / "a.png"),), torch.tensor([0]), 8)
    assert files.dataset(*PLAIN)[0][0].count_nonzero() == 0


@pytest.mark.parametrize(
    ("array", "kind"),
    [
        (np.full((8, 8), 40_000, np.uint16), "I;16"),
        (np.full((8, 8), 0.5, np.float32), "F"),
    ],
)
def test_deeper_pixels_are_refused(array: Any, kind: str, tmp_path: Path) -> None:
    files = saved(tmp_path / "a.tif", array)
    with pytest.raises(ValueError, match=rf"a.tif has pixels of the kind '{kind}'"):
        files.dataset(*PLAIN)[0]


def test_augmentation_follows_the_global_generator(tmp_path: Path) -> None:
    files = saved(tmp_path / "a.png", pixels(30, 20))
    plain = files.dataset(*PLAIN)
    augmented = files.dataset(*PLAIN, augment=True)
    assert torch.equal(plain[0][0], plain[0][0])
    torch.manual_seed(3)
    first = [augmented[0][0] for _ in range(4)]
    torch.manual_seed(3)
    again = [augmented[0][0] for _ in range(4)]
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], first[1])
    assert first[0].shape == (3, 8, 8)


def test_half_of_the_augmented_are_mirrored(tmp_path: Path) -> None:
    ramp = np.broadcast_to(np.arange(64, dtype=np.uint8) * 4, (64, 64))
    files = saved(tmp_path / "a.png", np.ascontiguousarray(ramp), channels=1)
    augmented = files.dataset((0.0,), (1.0,), augment=True)
    torch.manual_seed(0)
    drawn = (augmented[0][0] for _ in range(60))
    rising = [bool(x[0, 0, 0] < x[0, 0, -1]) for x in drawn]
    assert 15 < sum(rising) < 46


def test_take_keeps_paths_and_labels_together() -> None:
    files = ImageFiles(("a", "b", "c"), torch.tensor([0, 1, 2]), 8, 1, 0.5)
    taken = files.take(torch.tensor([2, 0]))
    assert taken.paths == ("c", "a")
    assert taken.labels.tolist() == [2, 0]
    assert (taken.image_size, taken.channels, taken.crop) == (8, 1, 0.5)


def test_broken_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    files = saved(path, pixels(9, 9))
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"a\.png can't be read as an image"):
        files.dataset(*PLAIN)[0]
    path.write_text("no image")
    with pytest.raises(ValueError, match="replace or remove the file"):
        files.dataset(*PLAIN)[0]
    path.unlink()
    with pytest.raises(FileNotFoundError, match="is gone since"):
        files.dataset(*PLAIN)[0]


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"image_size": 0}, ValueError, "image_size must be at least 1"),
        ({"image_size": 8.0}, TypeError, "image_size must be an integer"),
        ({"channels": 4}, ValueError, r"3 \(colour\) or 1 \(grey\), got 4"),
        ({"channels": True}, ValueError, "got True"),
        ({"crop": 0.0}, ValueError, r"in \(0, 1\], got 0.0; for instance crop=0.875"),
        ({"crop": 1.5}, ValueError, "got 1.5"),
        ({"crop": "all"}, TypeError, "got 'all'"),
    ],
)
def test_bad_cuts(kwargs: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ImageFiles((), torch.tensor([0])[:0], **{"image_size": 8, **kwargs})
