"""Files that are complete or absent, readable by their owner only; arrays as npz."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]

_WHOLE: Final = ("i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1")
# Name of an array to its dimensions and types; others are nobody's business.
_FORMS: Final = {
    **dict.fromkeys(("epoch", "step"), (0, _WHOLE)),
    **dict.fromkeys(("sample", "class", "index", "label"), (1, _WHOLE)),
    "eigenvalues": (2, ("f8", "f4")),
    **dict.fromkeys(("pixels", "original", "near", "random"), (4, ("u1",))),
}
_NEEDED: Final = {
    "probes": {"pixels", "index", "label"},
    "attacks": {"sample", "class", "epoch", "step"},
}


def make_private_directory(directory: Path) -> None:
    """Create a directory, and its parents, that only its owner can read.

    A directory that exists keeps its mode: someone chose it.
    """
    if directory.is_dir():
        return
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` so that ``path`` never holds a part of it.

    The bytes go to a temporary file in the same directory (a rename is atomic
    within one file system only), reach the disk, and then take the name. A kill
    at any moment leaves the old file or the new one. The file's mode is 0o600.

    Raises:
        OSError: If the disk is full or the directory is not writable; the old
            file, if there was one, is untouched.
    """
    handle, name = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"
    )
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make a rename or removal in ``directory`` durable, where that is possible."""
    # Windows cannot open a directory and some network file systems refuse to
    # sync one; the rename itself stays atomic there.
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def encode_arrays(arrays: Mapping[str, npt.ArrayLike]) -> bytes:
    """Return npz bytes; pickled objects are refused, so reading runs no code.

    Raises:
        ValueError: If an array holds Python objects.
    """
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, value in arrays.items():
            array = np.asarray(value)
            if array.dtype.hasobject:
                raise ValueError(
                    f"array {name!r} holds Python objects; expected numbers or text"
                )
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    return stream.getvalue()


def decode_arrays(data: bytes) -> Arrays:
    """Return the arrays of an npz file.

    Raises:
        ValueError: If the bytes are cut short, are not an npz file, or hold
            pickled objects.

    Example:
        >>> decode_arrays(encode_arrays({"epoch": 3}))["epoch"].item()
        3
    """
    if not data.startswith(b"PK"):
        raise ValueError("it is not an npz file")
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except Exception as error:  # damaged headers fail in many ways
        raise ValueError(f"it is not a complete npz file ({error})") from error


def check_arrays(kind: str, arrays: Arrays) -> None:
    """Refuse arrays of a run directory whose shapes or types no reader expects.

    Args:
        kind: ``"spectra"``, ``"attacks"`` or ``"probes"``.
        arrays: As decoded.

    Raises:
        ValueError: The text says which array is what.
    """
    lacking = _NEEDED.get(kind, set()) - arrays.keys()
    if lacking:
        raise ValueError(f"it holds {sorted(arrays)}, and no {sorted(lacking)}")
    known = {name: arrays[name] for name in _FORMS if name in arrays}
    pictures = {array.shape for array in known.values() if array.ndim == 4}
    lengths = {len(array) for array in known.values() if array.ndim}
    fits = len(pictures) <= 1 and len(lengths) <= 1
    if kind == "attacks":  # drawn as they are
        fits = fits and all(s[3] in (1, 3) and 0 not in s[1:] for s in pictures)
    for name, array in known.items():
        dimensions, types = _FORMS[name]
        fits = fits and array.ndim == dimensions and array.dtype.str[1:] in types
    if not fits:
        shapes = ", ".join(f"{k} {v.dtype} {v.shape}" for k, v in known.items())
        raise ValueError(f"no reader knows its shapes or types: {shapes}")
