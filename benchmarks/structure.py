"""How the package is built: files, folders, lines of code, arrows and circles.

    python benchmarks/structure.py [FOLDER, default: leakwatch]

Lines of code are those with a token that is neither a comment nor part of a docstring.
An arrow is a pair of rooms of which one imports from the other, inside of a function or
for type checkers only too; a room is a folder or a module at the top of the package. A
circle is a set of files that reach each other by imports.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

_SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of_code(source: str) -> int:
    """Lines without blanks, comments and docstrings."""
    described: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            first = node.body[0]
            described.update(range(first.lineno, (first.end_lineno or 0) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _SILENT:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - described)


def imports(source: str, modules: Mapping[str, Path]) -> Iterator[str]:
    """Modules of the package that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                name = inner if inner in modules else node.module
                if name in modules:
                    yield name


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of two or more nodes that reach each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for after in graph.get(waiting.pop(), ()):
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
        return seen

    reach = {node: reached(node) for node in graph}
    groups: dict[frozenset[str], None] = {}
    for node in graph:
        if node in reach[node]:
            group = frozenset(n for n in reach[node] if node in reach.get(n, ()))
            if len(group) > 1:
                groups[group] = None
    return [sorted(group) for group in groups]


def main() -> None:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="leakwatch", type=Path)
    folder: Path = parser.parse_args().folder
    modules: dict[str, Path] = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = path
    sources = {name: path.read_text() for name, path in modules.items()}

    def room(name: str) -> str:
        return modules[name].relative_to(folder).parts[0]

    # A package's own list of names points at its modules and closes no circle.
    graph = {
        name: set(imports(source, modules)) - {name} for name, source in sources.items()
    }
    inner = {
        name: after for name, after in graph.items() if modules[name].stem != "__init__"
    }
    arrows = {
        (room(name), room(other))
        for name, after in graph.items()
        for other in after
        if room(name) != room(other)
    }
    folders = {path.parent for path in modules.values()}
    largest = max(
        folders, key=lambda f: sum(path.parent == f for path in modules.values())
    )
    most = sum(path.parent == largest for path in modules.values())
    print(f"files                {len(modules)}")
    print(f"folders              {len(folders)}, most files in one: {most} ({largest})")
    print(f"lines of code        {sum(map(lines_of_code, sources.values()))}")
    print(f"rooms and arrows     {len({room(n) for n in modules})}, {len(arrows)}")
    found = circles(inner)
    print(f"circles of files     {len(found)}")
    for group in found:
        print("  " + ", ".join(group))


if __name__ == "__main__":
    main()
