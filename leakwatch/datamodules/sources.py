"""Public data sets through torchvision's readers, with errors that say what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, final

import torch

from leakwatch.datamodules.dataset import ImageArrays

_FAILURES = (RuntimeError, OSError, ValueError, AssertionError, EOFError, HTTPException)


@final
@dataclass(frozen=True)
class TorchvisionSource:
    """Where a torchvision data set lies and how it is read.

    Args:
        name: Of the data set, for error texts.
        reader: torchvision's class: `reader(root, train=..., download=...)`.
        folder: Where its files lie, relative to `data_dir`.
        files: Which files these are, in words.
        url: Where a person gets them.
    """

    name: str
    reader: Callable[..., Any]
    folder: str
    files: str
    url: str

    def fetch(self, data_dir: str | Path, *, download: bool) -> None:
        """Make sure that the files are there, downloading them when allowed.

        Raises:
            FileNotFoundError: They are not; the message gives the expected folder.
        """
        self._open(data_dir, train=False, download=download)

    def read(self, data_dir: str | Path, *, train: bool) -> ImageArrays:
        """Read one split, as uint8 (n, C, H, W).

        Raises:
            FileNotFoundError: The files are missing or can't be read.
        """
        dataset = self._open(data_dir, train=train, download=False)
        images = torch.as_tensor(dataset.data)
        images = images.permute(0, 3, 1, 2) if images.ndim == 4 else images.unsqueeze(1)
        labels = torch.as_tensor(dataset.targets, dtype=torch.int64)
        return ImageArrays(images.contiguous(), labels)

    def _open(self, data_dir: str | Path, *, train: bool, download: bool) -> Any:
        root = Path(data_dir).expanduser()
        try:
            with warnings.catch_warnings():
                # NumPy 2.4.0 to 2.4.4 warn about pickles as old as CIFAR's
                warnings.filterwarnings("ignore", message=r"dtype\(\): align should be")
                return self.reader(str(root), train=train, download=download)
        except _FAILURES as error:
            tried = "could not be downloaded" if download else "can't be read"
            raise FileNotFoundError(
                f"{self.name} {tried} ({' '.join(str(error).split())}): get "
                f"{self.files} from {self.url}, put the unpacked files in "
                f"{root / self.folder}, and pass data_dir={str(data_dir)!r} and "
                "download=False; or pass download=True where there is a network."
            ) from error
