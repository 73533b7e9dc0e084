"""Which parameters a client shares, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

__all__ = ["ParameterFilter", "check_filter", "matching"]

ParameterFilter: TypeAlias = str | Sequence[str] | Callable[[str, nn.Parameter], bool]
"""Names, or patterns of names; or a function of name and parameter.

A name stands for a parameter or for a module with all that it holds; patterns have
``*``, ``?`` and ``[…]`` as in a shell: ``"fc"``, ``"*.bias"``, ``["head", "*lora*"]``.
"""

_MOST_LISTED = 8


def check_filter(wanted: object) -> None:
    """Raises unless this can be a filter.

    Raises:
        TypeError: for anything but a name, names or a function.
        ValueError: for no names.
    """
    if callable(wanted):
        return
    names = [wanted] if isinstance(wanted, str) else wanted
    if not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
        raise TypeError(
            f"parameters must be a name, a list of names, or a function of name and "
            f"parameter, got {wanted!r}; for instance parameters='fc' or "
            f"parameters=['head.*', '*.bias']."
        )
    if not names:
        raise ValueError(
            "parameters names none; leave it out to share all of them, or name some, "
            "for instance parameters='fc'."
        )


def matching(
    parameters: Mapping[str, nn.Parameter], wanted: ParameterFilter
) -> frozenset[str]:
    """Names of the parameters that a filter chooses.

    Args:
        parameters: by name.
        wanted: the filter.

    Returns:
        The names.

    Raises:
        TypeError: as :func:`check_filter`.
        ValueError: if one of the names matches nothing, or all that match is frozen.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        >>> sorted(matching(dict(net.named_parameters()), "1"))
        ['1.bias', '1.weight']
    """
    check_filter(wanted)
    if callable(wanted):
        chosen = frozenset(k for k, p in parameters.items() if wanted(k, p))
        missing = [] if chosen else ["the function given"]
    else:
        names = [wanted] if isinstance(wanted, str) else list(wanted)
        by_name = {name: _chosen(parameters, name) for name in names}
        chosen = frozenset[str]().union(*by_name.values())
        missing = [repr(name) for name, matches in by_name.items() if not matches]
    if missing:
        raise ValueError(
            f"parameters: {', '.join(missing)} matches none of the network's "
            f"{len(parameters)} parameters, such as {_listed(parameters)}."
        )
    if not any(parameters[name].requires_grad for name in chosen):
        raise ValueError(
            f"parameters: all that match, {_listed(sorted(chosen))}, are frozen "
            f"(requires_grad=False), so nothing would be shared."
        )
    return chosen


def _chosen(parameters: Iterable[str], pattern: str) -> set[str]:
    inside = f"{pattern.removesuffix('.')}.*"
    return {
        name
        for name in parameters
        if fnmatchcase(name, pattern) or fnmatchcase(name, inside)
    }


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - _MOST_LISTED
    text = ", ".join(map(repr, listed[:_MOST_LISTED]))
    return f"{text} and {more} more" if more > 0 else text
