"""Docstrings of the package, as the site shows them: roles are links, math is math."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?([^`]+)`")
_MATH = re.compile(
    r"^(?P<indent> *)\.\. math::(?P<tex>.*(?:\n(?:(?P=indent) +\S.*))*)", re.MULTILINE
)
_LITERAL = re.compile(r"(?<=[^:\s])::$", re.MULTILINE)


def _link(text: str, scope: griffe.Object) -> str:
    """The name as code, and a link where the site has such a page."""
    try:
        target = scope.resolve(text)
    except griffe.NameResolutionError:
        target = text
    return f'<autoref identifier="{target}" optional><code>{text}</code></autoref>'


def _formula(found: re.Match[str]) -> str:
    indent, tex = found["indent"], " ".join(found["tex"].split())
    return f"\n{indent}$$\n{indent}{tex}\n{indent}$$\n"


class Roles(griffe.Extension):
    """Rewrites Sphinx roles and directives, which Markdown does not know."""

    def on_module(self, *, mod: griffe.Module, **_: Any) -> None:
        """Leaves out what a module says of its files: pages have their own start."""
        mod.docstring = None

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe with each module, class, function and attribute."""
        if obj.docstring is None:
            return
        text = _MATH.sub(_formula, obj.docstring.value)
        text = _LITERAL.sub(":", text)
        obj.docstring.value = _ROLE.sub(lambda found: _link(found[1], obj), text)
