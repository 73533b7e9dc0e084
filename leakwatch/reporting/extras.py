"""Optional dependencies of the reporting layer, imported when they are needed."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, purpose: str) -> Any:
    """Import a module of the ``report`` extra, or say how to install it.

    Args:
        module: Dotted name, such as ``"plotly.graph_objects"``.
        purpose: What needs it; the subject of the error's sentence.

    Returns:
        The imported module.

    Raises:
        ModuleNotFoundError: If the package is not installed.

    Example:
        >>> require("json", "this example").dumps([1])
        '[1]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ModuleNotFoundError(
            f"{purpose} needs {package}, which is not installed. "
            "Install it with: pip install jinja2 plotly pandas",
            name=package,
        ) from error
