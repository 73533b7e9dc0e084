"""Prints requirements for the oldest versions that a pyproject.toml declares.

Of what leakwatch needs, not of the tools that only its tests need.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

EXTRAS = ("demo", "report", "dashboard", "quality")


def oldest(pyproject: Path) -> list[str]:
    """``name>=1.2`` becomes ``name==1.2.*``, and ``name>=1.2.3`` ``name==1.2.3``."""
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *(d for e in EXTRAS for d in extras[e])]
    pinned = []
    for requirement in declared:
        match = re.fullmatch(r"([\w\[\]-]+)>=([\d.]+)", requirement)
        if match is None:
            raise ValueError(f"{requirement!r} is not of the form name>=version")
        name, version = match.groups()
        exact = version.count(".") == 2
        pinned.append(f"{name}=={version}" + ("" if exact else ".*"))
    return pinned


if __name__ == "__main__":
    print(" ".join(oldest(Path(sys.argv[1]))))
