"""All scores by name: one small file per family, one line per score."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeAlias, final

from leakwatch.names import meant
from leakwatch.scores.measure.plan import Need
from leakwatch.scores.measure.sample_spectrum import SampleSpectrum
from leakwatch.scores.result import Value
from leakwatch.scores.settings import Settings

Direction: TypeAlias = Literal["higher = more exposed", "higher = less exposed"]
#: What computes a score from what was measured about a sample.
Formula: TypeAlias = Callable[[SampleSpectrum, Settings], Value]


@final
@dataclass(frozen=True)
class Score:
    """One score.

    Attributes:
        name: key in results, ledger and logs.
        compute: the number from what was measured about a sample.
        needs: what has to be measured. ``"cosine"`` makes the ends that are asked for
            available for the cosine distance too; ``"noise"`` stands for ``noise_std``
            or a perturbation. Without needs only loss and ‖g‖ are there.
        unit: in words.
        direction: which end means more exposure, so which end is the worst sample.
        meaning: one sentence for people who have not read the papers.
        source: paper and equation.
    """

    name: str
    compute: Formula
    needs: frozenset[Need]
    unit: str
    direction: Direction
    meaning: str
    source: str


_SCORES: dict[str, Score] = {}
_GROUPS: dict[str, list[str]] = {}


def register(score: Score, *groups: str) -> Score:
    """Adds a score under its name and to groups that can be asked for as one.

    A group may bear the name of one of its scores, as ``"i2f"`` does.

    Args:
        score: the score.
        groups: names of groups, such as ``"lavp"``.

    Returns:
        The same score.

    Raises:
        ValueError: if the name is taken, by a score or a group.
    """
    if score.name in _SCORES or (score.name in _GROUPS and score.name not in groups):
        raise ValueError(
            f"a score or group named {score.name!r} is registered already; choose "
            f"another name"
        )
    for group in groups:
        if group in _SCORES and group not in _GROUPS and group != score.name:
            raise ValueError(
                f"{group!r} is the name of a score, so it can't be a group of "
                f"{score.name!r}; choose another group name"
            )
    _SCORES[score.name] = score
    for group in groups:
        _GROUPS.setdefault(group, []).append(score.name)
    return score


def scored(
    *groups: str,
    needs: Iterable[Need] = (),
    unit: str,
    direction: Direction,
    meaning: str,
    source: str,
) -> Callable[[Formula], Formula]:
    """Registers the formula that follows as the score of its own name.

    Args:
        groups: as for :func:`register`.
        needs: as in :class:`Score`, like all that follow.
        unit: in words.
        direction: which end means more exposure.
        meaning: one sentence.
        source: paper and equation.

    Returns:
        A decorator that gives the formula back.
    """

    def registered(compute: Formula) -> Formula:
        score = Score(
            name=compute.__name__,
            compute=compute,
            needs=frozenset(needs),
            unit=unit,
            direction=direction,
            meaning=meaning,
            source=source,
        )
        register(score, *groups)
        return compute

    return registered


def available() -> tuple[str, ...]:
    """Names of all registered scores."""
    return tuple(_SCORES)


def groups() -> dict[str, tuple[str, ...]]:
    """Group name → names of its scores."""
    return {name: tuple(members) for name, members in _GROUPS.items()}


def get(name: str) -> Score:
    """The score of that name, also when a group has the same name.

    Raises:
        ValueError: if there is none; lists those that there are.

    Example:
        >>> get("i2f").name
        'i2f'
    """
    if name not in _SCORES:
        _refuse(name)
    return _SCORES[name]


def resolve(names: str | Score | Iterable[str | Score]) -> tuple[Score, ...]:
    """Scores for a list of score and group names, in order, without repetition.

    Args:
        names: for instance ``["lavp", "i2f_bayes"]``; a group name stands for all of
            its scores. A :class:`Score`, registered or not, stands for itself.

    Returns:
        The scores.

    Raises:
        ValueError: for an unknown name or an empty list; names what can be asked for.

    Example:
        >>> [s.name for s in resolve(["grad_norm", "norms"])]
        ['grad_norm', 'jacobian_norm', 'loss']
    """
    if not isinstance(names, str | Iterable | Score):
        _refuse(names)
    wanted = [names] if isinstance(names, str | Score) else list(names)
    if not wanted:
        raise ValueError(f"no score asked for; choose from {_choices()}")
    resolved: dict[str, Score] = {}
    for name in wanted:
        if isinstance(name, Score):
            resolved.setdefault(name.name, name)
        elif not isinstance(name, str):
            _refuse(name)
        elif name in _GROUPS:
            for member in _GROUPS[name]:
                resolved.setdefault(member, _SCORES[member])
        else:
            resolved.setdefault(name, get(name))
    return tuple(resolved.values())


def _refuse(name: object) -> NoReturn:
    group = isinstance(name, str) and name in _GROUPS
    near = "" if group else meant(name, (*_SCORES, *_GROUPS))
    raise ValueError(f"unknown score {name!r}; {near}choose from {_choices()}")


def _choices() -> str:
    return f"groups {', '.join(sorted(_GROUPS))} or scores {', '.join(sorted(_SCORES))}"
