"""Broken images, wrong units and missing weights are said, not turned into numbers."""

from __future__ import annotations

import builtins
import importlib
import logging
import sys
from pathlib import Path

import pytest
import torch

from leakwatch.quality import api, quality
from leakwatch.quality.perceptual import weights_file


def image(n: int = 2, channels: int = 1) -> torch.Tensor:
    return torch.linspace(0, 1, 144).reshape(1, 1, 12, 12).repeat(n, channels, 1, 1)


def test_broken_images_fail_alone() -> None:
    a, b = image(4), image(4)
    a[1, 0, 3, 3] = torch.nan
    a[2, 0, 0, 0] = torch.inf
    b[3, 0, 0, 0] = torch.nan
    result = quality(a, b)
    for name in ("mse", "rmse", "psnr", "ssim"):
        words = [s.word for s in result.status[name]]
        assert words == ["ok", "failed", "failed", "failed"]
        assert result[name].isnan().tolist() == [False, True, True, True]
        assert result.usable(name).tolist() == [True, False, False, False]
        assert "reconstruction" in result.status[name][1].reason
        assert "original" in result.status[name][3].reason


def test_all_broken_is_no_error() -> None:
    a = torch.full((2, 1, 12, 12), torch.nan)
    assert quality(a, image())["psnr"].isnan().all()


def test_units_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lie in \[-2, 2\].*mean and std"):
        quality(image() * 4 - 2, image() * 4 - 2)
    with pytest.raises(ValueError, match="give both or neither"):
        quality(image(), image(), mean=(0.5,))
    with pytest.raises(ValueError, match="either pixels or mean"):
        quality(image(), image(), mean=(0.5,), std=(1.0,), pixels=object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"2 entries, one per channel, but .* has 3;"):
        quality(image(2, 3), image(2, 3), mean=(0.5, 0.5), std=(1.0, 1.0))


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match=r"same shape .*leakwatch.quality.align"):
        quality(image(2), image(3))
    with pytest.raises(TypeError, match=r"torch.uint8"):
        quality(image().byte(), image())
    with pytest.raises(
        ValueError, match=r"unknown metric 'psrn'; did you mean 'psnr'. there are mse"
    ):
        quality(image(), image(), metrics=("psrn",))
    with pytest.raises(ValueError, match="no metric asked for"):
        quality(image(), image(), metrics=())
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="data_range must be positive"):
            quality(image(), image(), data_range=bad)


def test_unknown_keys_name_what_there_is() -> None:
    result = quality(image(), image(), metrics=("mse",))
    with pytest.raises(KeyError, match="it holds mse"):
        result["psnr"]
    assert dict(result).keys() == {"mse"}


@pytest.fixture
def fresh_log(monkeypatch: pytest.MonkeyPatch) -> None:
    api._say_once.cache_clear()


@pytest.mark.usefixtures("fresh_log")
def test_missing_weights_leave_the_metric_out_and_say_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    names = ("psnr", "lpips_vgg")
    with caplog.at_level(logging.WARNING):
        results = [quality(image(), image(), metrics=names) for _ in range(2)]
    assert list(results[0]) == ["psnr"]
    assert "vgg16" in results[0].absent["lpips_vgg"]
    assert len(caplog.records) == 1
    assert str(tmp_path) in caplog.text
    with pytest.raises(KeyError, match="weights of its backbone are missing"):
        results[0]["lpips_vgg"]
    assert not any(tmp_path.rglob("*.pth"))


@pytest.mark.usefixtures("fresh_log")
@pytest.mark.parametrize("content", [b"", b"half an archive"])
def test_broken_weights_leave_the_metric_out(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lpips")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    file = weights_file("squeeze")
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    result = quality(image(), image(), metrics=("lpips_squeeze",))
    assert "lpips_squeeze" not in result
    assert "can't be loaded" in result.absent["lpips_squeeze"]


@pytest.mark.usefixtures("fresh_log")
def test_zeroed_weights_are_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lpips")
    torchvision = importlib.import_module("torchvision")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    file = weights_file("squeeze")
    file.parent.mkdir(parents=True)
    state = torchvision.models.squeezenet1_1(weights=None).state_dict()
    torch.save({k: torch.zeros_like(v) for k, v in state.items()}, file)
    result = quality(image(), image(), metrics=("lpips_squeeze",))
    assert "not the trained ones" in result.absent["lpips_squeeze"]


@pytest.mark.usefixtures("fresh_log")
def test_a_missing_package_leaves_its_metric_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "piq", raising=False)
    original = builtins.__import__

    def without_piq(name: str, *rest: object) -> object:
        if name.split(".")[0] == "piq":
            raise ImportError(name)
        return original(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setitem(sys.modules, "piq", None)
    monkeypatch.setattr(builtins, "__import__", without_piq)
    result = quality(image(), image(), metrics=("fsim", "mse"))
    assert list(result) == ["mse"]
    assert "pip install" in result.absent["fsim"]


def test_colour_networks_refuse_odd_channel_counts() -> None:
    pytest.importorskip("piq")
    a = image(2, 4).repeat(1, 1, 2, 2)
    result = quality(a, a, metrics=("fsim", "ssim"))
    assert result.status["fsim"][0].word == "undefined"
    assert result.status["ssim"][0].word == "ok"
