"""Named arrays as npz bytes, without pickled objects."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]


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
    except (OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"it is not a complete npz file ({error})") from error
