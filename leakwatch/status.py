"""What a result is worth: values and reconstructions never come without it."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

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


_CONTENT = re.compile(r"(tensor\(|array\(|\[\[|\[\s*-?\d+[.,\s]).*", re.DOTALL)
# Not the numbers inside names, such as "layer1.0.conv".
_DECIMAL = re.compile(r"(?<![\w.])-?\d*\.\d+(e[+-]?\d+)?", re.IGNORECASE)


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
    text = _DECIMAL.sub("…", _CONTENT.sub("…", line))[:160]
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = ""
    if frame is not None:
        code = frame.tb_frame.f_code
        where = f" ({code.co_filename.rsplit('/', 1)[-1]}:{frame.tb_lineno})"
    return f"{type(error).__name__}: {text}{where}"
