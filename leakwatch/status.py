"""What a result is worth: values and reconstructions never come without it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from leakwatch.names import meant
from leakwatch.notebook import Tabular, dots

if TYPE_CHECKING:
    from jaxtyping import Bool
    from torch import Tensor

__all__ = ["OK", "STATUS_WORDS", "Measured", "Status", "describe_error"]

#: The words that a status may have.
STATUS_WORDS: Final = (
    "ok",
    "estimated",
    "unresolved",
    "not converged",
    "not computed",
    "undefined",
    "failed",
)


class Status(NamedTuple):
    """What a value is worth.

    Attributes:
        word: ``ok``: known to at least 10 %, mostly to far more digits; ``estimated``:
            to be read together with the error that the reason states, from random
            probes or from rounding; ``unresolved``: rounding may have changed it by
            more than its size; ``not converged``: the solver stopped early, the number
            is a bound at best; ``not computed``: this solver or these arguments can't
            give it; ``undefined``: there is no such number for this sample, for
            instance because it is infinite; ``failed``: an error.
        reason: one sentence: why, and what to do.
    """

    word: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}" if self.reason else self.word

    @property
    def usable(self) -> bool:
        """Whether the value is a number to be read, averaged or plotted."""
        return self.word in ("ok", "estimated")


OK: Final = Status("ok")


class Measured(Mapping[str, "Tensor"], Tabular):
    """Values of samples by name, each with a status: base of what measuring returns.

    Attributes:
        numbers: name → values, one for each sample.
        status: name → one :class:`Status` for each value, nested as the values are.
        kind: what a name stands for, in errors.
    """

    numbers: dict[str, Any]
    status: dict[str, Any]
    kind: ClassVar[str]

    def __getitem__(self, name: str) -> Tensor:
        self._check(name)
        value: Tensor = self.numbers[name]
        return value

    def __repr__(self) -> str:
        shape = "×".join(map(str, self._shape()))
        names = ", ".join(self.numbers)
        return f"{type(self).__name__}({shape} samples: {shortened(names, 60)})"

    def __iter__(self) -> Iterator[str]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def records(self) -> list[dict[str, Any]]:
        """One row for each sample: its place, its values, and what is wrong with them.

        A value that can't be read is NaN.
        """
        shape = self._shape()
        axes = ("client", "sample")[-len(shape) :]
        rows: list[dict[str, Any]] = []
        for place in product(*map(range, shape)):
            row: dict[str, Any] = dict(zip(axes, place, strict=True))
            doubts = []
            for name, values in self.numbers.items():
                status = _at(self.status[name], place)
                row[name] = float(values[place]) if status.usable else math.nan
                if status != OK:
                    doubts.append(f"{name}: {status}")
            rows.append({**row, "status": "; ".join(doubts) or "ok"})
        return rows

    def plot(self, name: str | None = None) -> Any:
        """One quantity of every sample, largest first: a plotly figure.

        Args:
            name: of the quantity. Default: the first.

        Raises:
            KeyError: if that name is not in the result.
            ModuleNotFoundError: plotly is not installed.
        """
        name = next(iter(self.numbers)) if name is None else name
        self._check(name)
        rows = self.records()
        return dots(
            [row[name] for row in rows],
            [str(row["status"]) for row in rows],
            title=f"{name} of {len(rows)} samples",
            axis=name,
        )

    def _shape(self) -> tuple[int, ...]:
        return tuple(next(iter(self.numbers.values())).shape) if self.numbers else (0,)

    def usable(self, name: str) -> Bool[Tensor, "..."]:
        """Which samples have a number worth reading, shaped as the numbers.

        Raises:
            KeyError: if that name is not in the result.
        """
        import torch  # not above: reports are read and written without it

        self._check(name)
        return torch.tensor(_usable(self.status[name]))

    def _check(self, name: str) -> None:
        if name not in self.numbers:
            raise KeyError(
                f"no {self.kind} {name!r} in this result; "
                f"{meant(name, self.numbers)}it holds "
                f"{', '.join(self.numbers)}"
            )


def _at(status: Any, place: tuple[int, ...]) -> Status:
    for i in place:
        status = status[i]
    found: Status = status
    return found


def _usable(status: Sequence[Any]) -> list[Any]:
    return [s.usable if isinstance(s, Status) else _usable(s) for s in status]


_CONTENT = re.compile(r"(tensor\(|array\(|\[\[|\[\s*-?\d+[.,\s]).*", re.DOTALL)
# Not the numbers inside names, such as "layer1.0.conv".
_DECIMAL = re.compile(r"(?<![\w.])-?\d*\.\d+(e[+-]?\d+)?", re.IGNORECASE)


def shortened(text: str, most: int) -> str:
    """Text on one line, ended after a sentence or at least after a word.

    Args:
        text: any.
        most: characters.

    Example:
        >>> shortened("It failed. For many reasons, of which this is the first.", 30)
        'It failed.'
        >>> shortened("A sentence that goes on", 15)
        'A sentence …'
    """
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    whole = line[:most].rpartition(". ")[0]
    return f"{whole}." if whole else f"{line[:most].rpartition(' ')[0]} …".lstrip()


def describe_error(error: BaseException) -> str:
    """An exception in one line that quotes no data.

    Statuses travel to remote loggers, and an error of the network may print the private
    sample that it met: printed tensors and decimal numbers are left out.

    Args:
        error: the exception.

    Returns:
        Its type, the start of its text, and where it was raised.

    Example:
        >>> describe_error(ValueError("bad input tensor([[0.8999, 0.6646]])"))
        'ValueError: bad input …'
        >>> describe_error(ValueError("0.25 reached layer1.0.weight"))
        'ValueError: … reached layer1.0.weight'
    """
    line = " ".join(str(error).split())
    text = shortened(_DECIMAL.sub("…", _CONTENT.sub("…", line)), 160)
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = ""
    if frame is not None:
        code = frame.tb_frame.f_code
        where = f" ({code.co_filename.rsplit('/', 1)[-1]}:{frame.tb_lineno})"
    return f"{type(error).__name__}: {text}{where}"
