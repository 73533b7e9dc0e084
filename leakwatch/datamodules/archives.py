"""Image archives that one address hands out: downloaded whole, or not at all."""

from __future__ import annotations

import hashlib
import tarfile
import tempfile
import zlib
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import final

from torch.hub import download_url_to_file

_FAILURES = (OSError, RuntimeError, EOFError, HTTPException, tarfile.TarError)


@final
@dataclass(frozen=True)
class Archive:
    """A .tgz that unpacks to one folder.

    Args:
        name: Of the data set, for error texts.
        url: Where it is.
        folder: What it unpacks to, relative to `data_dir`.
        layout: What is inside that folder, for error texts.
        md5: Of the archive; None: only that it is complete is checked.
    """

    name: str
    url: str
    folder: str
    layout: str
    md5: str | None = None

    def hint(self, data_dir: str | Path) -> str:
        """Say where the files are expected and how they get there."""
        root = Path(data_dir).expanduser()
        return (
            f"Expected {root / self.folder}/{self.layout}: get {self.url}, unpack it "
            f"in {root}, and pass data_dir={str(data_dir)!r} and download=False; or "
            "pass download=True where there is a network."
        )

    def fetch(self, data_dir: str | Path, *, download: bool) -> Path:
        """Return the folder, after downloading it when allowed and missing.

        What fails halfway leaves nothing behind.

        Raises:
            FileNotFoundError: It is not there; the message gives the expected layout.
        """
        root = Path(data_dir).expanduser()
        folder = root / self.folder
        if folder.is_dir():
            return folder
        if not download:
            raise FileNotFoundError(
                f"{self.name} is not in {folder}. {self.hint(data_dir)}"
            )
        try:
            root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=root) as place:
                file = Path(place, "archive.tgz")
                download_url_to_file(self.url, str(file))
                self._check(file)
                with tarfile.open(file) as archive:
                    archive.extractall(place, filter="data")
                Path(place, self.folder).rename(folder)
        except (*_FAILURES, zlib.error) as error:
            why = " ".join(str(error).split())
            raise FileNotFoundError(
                f"{self.name} could not be downloaded ({why}). {self.hint(data_dir)}"
            ) from error
        return folder

    def _check(self, file: Path) -> None:
        if self.md5 is None:
            return
        with file.open("rb") as content:
            md5 = hashlib.file_digest(
                content, lambda: hashlib.md5(usedforsecurity=False)
            ).hexdigest()
        if md5 != self.md5:
            raise OSError(f"its MD5 sum is {md5}, expected {self.md5}")
