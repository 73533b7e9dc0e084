"""The configs that come with the package: ``leakwatch:quickstart`` and others."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from leakwatch.names import meant

PREFIX: Final = "leakwatch:"

_FOLDER: Final = Path(__file__).parents[1] / "configs"


def configs(argv: list[str]) -> None:
    """List the configs that come with the package, or print one to start from.

    Args:
        argv: Command line after ``leakwatch configs``.

    Raises:
        ValueError: There is none of that name.
    """
    parser = argparse.ArgumentParser(
        prog="leakwatch configs",
        description="List the configs that come with the package, or print one: "
        "`leakwatch configs quickstart > mine.yaml`.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="of the one to print")
    name = parser.parse_args(argv).name
    if name is None:
        print("\n".join(PREFIX + known for known in _names()))
    else:
        print(find_config(name).read_text("utf-8"), end="")


def with_paths(argv: Sequence[str]) -> list[str]:
    """Put paths in place of names such as ``leakwatch:quickstart``.

    Args:
        argv: Options of a command.

    Raises:
        ValueError: There is no config of that name.

    Example:
        >>> with_paths(["--config=leakwatch:quickstart", "--x=1"])[0].endswith(".yaml")
        True
    """
    found = []
    for before, option in zip(["", *argv], argv, strict=False):
        key, mark, name = option.rpartition(PREFIX)
        if mark and (key.endswith("=") or (not key and before in ("-c", "--config"))):
            option = f"{key}{find_config(name)}"
        found.append(option)
    return found


def find_config(name: str) -> Path:
    """Return the file of a config that comes with the package.

    Args:
        name: Such as ``"quickstart"`` or ``"attack/lavp_cosine"``; the prefix and
            ``.yaml`` may stand around it.

    Raises:
        ValueError: There is none of that name.
    """
    name = name.removeprefix(PREFIX).removesuffix(".yaml")
    if name not in _names():
        raise ValueError(
            f"there is no config {PREFIX}{name}; {meant(name, _names())}"
            "`leakwatch configs` lists them."
        )
    return _FOLDER / f"{name}.yaml"


def _names() -> list[str]:
    """Of all configs, those that stand alone first."""
    paths = [path.relative_to(_FOLDER) for path in _FOLDER.rglob("*.yaml")]
    paths.sort(key=lambda path: (len(path.parts), path))
    return [path.with_suffix("").as_posix() for path in paths]
