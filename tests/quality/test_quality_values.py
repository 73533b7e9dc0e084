"""Values of the metrics against closed forms and independent computations."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from leakwatch.quality import QualityResult, quality

EXACT = {"rtol": 1e-12, "atol": 1e-14}


def pictures(
    n: int = 3, channels: int = 3, side: int = 16, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Smooth originals in [0, 1] and noisy reconstructions of them, float64."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, channels, 4, 4, generator=generator, dtype=torch.float64)
    originals = torch.nn.functional.interpolate(
        coarse, size=(side, side), mode="bilinear"
    )
    noise = torch.randn(originals.shape, generator=generator, dtype=torch.float64)
    return (originals + 0.05 * noise).clamp(0, 1), originals


def test_errors_of_a_shifted_image_are_the_shift() -> None:
    x = torch.full((2, 1, 8, 8), 0.25, dtype=torch.float64)
    shift = torch.tensor([0.1, 0.5], dtype=torch.float64)
    result = quality(x + shift[:, None, None, None], x)
    torch.testing.assert_close(result["mse"], shift**2, **EXACT)
    torch.testing.assert_close(result["rmse"], shift, **EXACT)
    torch.testing.assert_close(result["psnr"], -20 * shift.log10(), **EXACT)


def test_data_range_moves_psnr_by_its_logarithm_and_leaves_mse() -> None:
    a, b = pictures()
    small = quality(a, b)
    large = quality(a * 255, b * 255, data_range=255.0)
    torch.testing.assert_close(large["psnr"], small["psnr"], **EXACT)
    torch.testing.assert_close(large["ssim"], small["ssim"], rtol=1e-9, atol=0)
    torch.testing.assert_close(large["mse"], small["mse"] * 255**2, **EXACT)


def test_means_and_deviations_are_undone_per_channel() -> None:
    a, b = pictures()
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.1)
    m, s = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (mean, std))

    class Scale:
        def to_pixels(self, x: Tensor) -> Tensor:
            return x * s + m

    plain = quality(a, b)
    for units in ({"mean": mean, "std": std}, {"pixels": Scale()}):
        found = quality((a - m) / s, (b - m) / s, **units)
        for name in plain:
            torch.testing.assert_close(found[name], plain[name], rtol=1e-9, atol=1e-12)


def test_perfect_recoveries_are_finite_at_the_stated_ceiling() -> None:
    _, b = pictures()
    for dtype, ceiling in ((torch.float32, 138.474), (torch.float64, 313.071)):
        result = quality(b.to(dtype), b.to(dtype))
        torch.testing.assert_close(
            result["psnr"], torch.full((3,), ceiling).double(), rtol=0, atol=1e-3
        )
        assert result.psnr_ceiling == pytest.approx(ceiling, abs=1e-3)
        assert {str(s) for s in result.status["psnr"]} == {
            f"ok: at the ceiling of {ceiling:.1f} dB, equal to rounding"
        }
        torch.testing.assert_close(
            result["ssim"], torch.ones(3).double(), rtol=0, atol=1e-12
        )
    assert quality(b, b, psnr_ceiling=60.0)["psnr"].tolist() == [60.0] * 3


def test_the_coarser_arithmetic_sets_the_ceiling() -> None:
    _, b = pictures()
    rounded = quality(b.float(), b.float().double())
    assert rounded["psnr"].max().item() == pytest.approx(138.474, abs=1e-3)


def test_pixels_outside_of_the_range_are_clipped() -> None:
    x = torch.full((1, 1, 4, 4), 0.9, dtype=torch.float64)
    far = torch.full_like(x, 7.0)
    assert quality(far, x)["rmse"].item() == pytest.approx(0.1, rel=1e-12)
    unclipped = quality(far, x, low=None)
    assert unclipped["rmse"].item() == pytest.approx(6.1, rel=1e-12)


def ssim_by_windows(a: Tensor, b: Tensor, size: int, sigma: float) -> float:
    """Wang et al.'s formula, one window after another, mirrored at the border."""
    half = size // 2
    offsets = np.arange(size) - half
    profile = np.exp(-(offsets**2) / (2 * sigma**2))
    weight = np.outer(profile, profile)
    weight /= weight.sum()
    values = []
    for x, y in zip(a.numpy(), b.numpy(), strict=True):
        p, q = (np.pad(t, half, mode="reflect") for t in (x, y))
        for i in range(x.shape[0]):
            for j in range(x.shape[1]):
                u = p[i : i + size, j : j + size]
                v = q[i : i + size, j : j + size]
                values.append(window_similarity(u, v, weight))
    return float(np.mean(values))


def window_similarity(
    u: npt.NDArray[np.float64],
    v: npt.NDArray[np.float64],
    weight: npt.NDArray[np.float64],
) -> float:
    mu, nu = (weight * u).sum(), (weight * v).sum()
    var_u = (weight * (u - mu) ** 2).sum()
    var_v = (weight * (v - nu) ** 2).sum()
    cov = (weight * (u - mu) * (v - nu)).sum()
    c1, c2 = 0.01**2, 0.03**2
    top = (2 * mu * nu + c1) * (2 * cov + c2)
    return float(top / ((mu**2 + nu**2 + c1) * (var_u + var_v + c2)))


@pytest.mark.parametrize(
    ("side", "size", "sigma"),
    [(16, 11, 1.5), (11, 11, 1.5), (10, 9, 1.2), (6, 5, 0.6), (3, 3, 0.3)],
)
def test_ssim_follows_its_formula_with_windows_that_fit(
    side: int, size: int, sigma: float
) -> None:
    a, b = pictures(2, side=side)
    result = quality(a, b, metrics=("ssim",))
    expected = torch.tensor(
        [ssim_by_windows(p, q, size, sigma) for p, q in zip(a, b, strict=True)],
        dtype=torch.float64,
    )
    torch.testing.assert_close(result["ssim"], expected, rtol=1e-8, atol=0)
    word = "ok" if side >= 11 else "estimated"
    assert [s.word for s in result.status["ssim"]] == [word] * 2


def test_ssim_of_grey_images_equals_that_of_three_equal_channels() -> None:
    a, b = pictures(2, channels=1)
    grey = quality(a, b, metrics=("ssim",))
    colour = quality(
        a.expand(-1, 3, -1, -1), b.expand(-1, 3, -1, -1), metrics=("ssim",)
    )
    torch.testing.assert_close(grey["ssim"], colour["ssim"], rtol=1e-12, atol=0)


def test_ssim_is_undefined_below_three_pixels() -> None:
    a, b = pictures(2, side=2)
    result = quality(a, b, metrics=("mse", "ssim"))
    assert result["ssim"].isnan().all()
    assert result.status["ssim"][0].word == "undefined"
    assert result.status["mse"][0].word == "ok"


def test_black_below_zero_is_moved_to_zero_for_ssim() -> None:
    a, b = pictures()
    moved = quality(a * 2 - 1, b * 2 - 1, low=-1.0, data_range=2.0)
    torch.testing.assert_close(moved["ssim"], quality(a, b)["ssim"], rtol=1e-9, atol=0)


def test_chunks_of_many_images_change_nothing() -> None:
    a, b = pictures(70, side=11)
    together = quality(a, b, metrics=("ssim",))["ssim"]
    apart = [
        quality(a[i : i + 1], b[i : i + 1], metrics=("ssim",))["ssim"]
        for i in (0, 63, 64, 69)
    ]
    torch.testing.assert_close(
        together[[0, 63, 64, 69]], torch.cat(apart), rtol=1e-10, atol=0
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_fsim_orders_equal_similar_and_unlike_images(channels: int) -> None:
    pytest.importorskip("piq")
    a, b = pictures(2, channels, side=32)
    values = [
        quality(x, b, metrics=("fsim",))["fsim"] for x in (b, a, torch.rand_like(b))
    ]
    torch.testing.assert_close(values[0], torch.ones(2).double(), rtol=0, atol=1e-9)
    assert (values[0] > values[1]).all()
    assert (values[1] > values[2]).all()


def test_fsim_of_flat_images_is_undefined() -> None:
    pytest.importorskip("piq")
    flat = torch.full((1, 1, 32, 32), 0.5)
    result = quality(flat, flat, metrics=("fsim",))
    assert result.status["fsim"][0].word == "undefined"
    assert math.isnan(result["fsim"].item())


def test_features_have_pixel_errors_only() -> None:
    a = torch.tensor([[1.0, 2.0, 2.0]], dtype=torch.float64)
    b = torch.tensor([[0.0, 0.0, 0.0]], dtype=torch.float64)
    result = quality(a, b, data_range=10.0)
    assert result["mse"].item() == pytest.approx(3.0, rel=1e-15)
    assert result["psnr"].item() == pytest.approx(10 * math.log10(100 / 3), rel=1e-14)
    assert result.status["ssim"][0].word == "undefined"
    assert "(3,)" in result.status["ssim"][0].reason


@pytest.fixture
def squeeze(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points to the SqueezeNet weights among the test data."""
    pytest.importorskip("lpips")
    root = os.environ.get("LEAKWATCH_TEST_DATA")
    if not root or not (Path(root) / "torch-home").is_dir():
        pytest.skip("needs LEAKWATCH_TEST_DATA with torch-home/ for LPIPS weights")
    monkeypatch.setenv("TORCH_HOME", str(Path(root) / "torch-home"))


def random_pair(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(42)
    a = torch.rand(n, 3, 100, 100, generator=generator) * 2 - 1
    return a, torch.rand(n, 3, 100, 100, generator=generator) * 2 - 1


def lpips_of(a: Tensor, b: Tensor, **options: float) -> QualityResult:
    return quality(a, b, metrics=("lpips_squeeze",), **options)


@pytest.mark.usefixtures("squeeze")
def test_lpips_gives_the_values_of_torchmetrics_documentation() -> None:
    ten = lpips_of(*random_pair(10), low=-1.0, data_range=2.0)["lpips_squeeze"]
    assert ten.mean().item() == pytest.approx(0.1005, abs=5e-5)
    two = lpips_of(*random_pair(2), low=-1.0, data_range=2.0)["lpips_squeeze"]
    expected = torch.tensor([0.1024, 0.0938], dtype=torch.float64)
    torch.testing.assert_close(two, expected, rtol=0, atol=5e-5)


@pytest.mark.usefixtures("squeeze")
def test_lpips_takes_grey_and_tiny_images() -> None:
    a, b = pictures(2, channels=1, side=40)
    grey = lpips_of(a, b)
    colour = lpips_of(a.expand(-1, 3, -1, -1), b.expand(-1, 3, -1, -1))
    torch.testing.assert_close(
        grey["lpips_squeeze"], colour["lpips_squeeze"], rtol=1e-6, atol=0
    )
    assert grey.status["lpips_squeeze"][0].word == "ok"
    tiny = lpips_of(*pictures(2, channels=1, side=3))
    assert tiny.status["lpips_squeeze"][0].word == "estimated"
    assert (tiny["lpips_squeeze"] > 0).all()
    _, same = pictures(2, channels=1, side=3)
    assert lpips_of(same, same)["lpips_squeeze"].tolist() == [0.0, 0.0]


@pytest.mark.usefixtures("squeeze")
def test_lpips_moves_no_random_stream() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    lpips_of(*pictures(1, side=32))
    torch.testing.assert_close(torch.get_rng_state(), before, rtol=0, atol=0)
