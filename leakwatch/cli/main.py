"""Choosing a command, and turning mistakes into one sentence and an exit code.

Nothing heavy is imported before a command needs it: ``leakwatch --help`` and
``leakwatch report`` take a fraction of a second, torch alone takes several.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import linecache
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from leakwatch import __version__
from leakwatch.cli.configs import with_paths
from leakwatch.cli.fit_help import fit_help
from leakwatch.names import meant, unknown


@final
@dataclass(frozen=True)
class _Command:
    """A command: ``function(argv)`` of a module that is imported when it is needed.

    Attributes:
        module: In ``leakwatch.cli``.
        function: Of that module.
        purpose: What it does, for the help.
        missing: What to say where there are no arguments; empty if none are needed.
    """

    module: str
    function: str
    purpose: str
    missing: str = ""

    def run(self, argv: list[str]) -> None:
        """Import the module and call its function."""
        module = importlib.import_module(f"leakwatch.cli.{self.module}")
        getattr(module, self.function)(argv)


_COMMANDS: Final = {
    "fit": _Command(
        "training",
        "fit",
        "train a model and watch what its gradients give away",
        "nothing to train; pass a config, such as "
        "`leakwatch fit --config leakwatch:quickstart`.",
    ),
    "audit": _Command("audit", "audit", "score a finished checkpoint once"),
    "attack": _Command(
        "audit",
        "attack",
        "invert gradients under a checkpoint, and compare with its scores",
    ),
    "compare-inits": _Command(
        "compare_inits",
        "compare_inits",
        "compare initialisations by what they give away",
        "nothing to compare; pass a config, such as "
        "`leakwatch compare-inits --config leakwatch:compare_inits`.",
    ),
    "trade-off": _Command(
        "trade_off",
        "compare_defenses",
        "compare defenses by what they cost and what they buy",
        "nothing to compare; pass a config, such as "
        "`leakwatch trade-off --config leakwatch:trade_off`.",
    ),
    "reproduce": _Command(
        "reproduce",
        "reproduce",
        "repeat tables and figures of the papers",
        "nothing to repeat; `leakwatch reproduce list` says what there is.",
    ),
    "report": _Command("report", "report", "rebuild report.html from a recorded run"),
    "show": _Command("show", "show", "print what a recorded run came to"),
    "compare": _Command("show", "compare", "print or draw recorded runs side by side"),
    "export": _Command("export", "export", "write every value of a run into a table"),
    "check": _Command("check", "check", "check a recorded run against limits"),
    "dashboard": _Command(
        "dashboard", "dashboard", "make a W&B view of what runs have logged"
    ),
    "configs": _Command("configs", "configs", "list the configs that come along"),
}

_USAGE: Final = """\
usage: leakwatch COMMAND ...

Watch how much of each private sample its shared gradient gives away.

commands:
{commands}

options:
  -h, --help  show this and exit; `leakwatch COMMAND --help` for one command
  --version   show the version and exit

examples:
  leakwatch fit --config leakwatch:quickstart
  leakwatch audit --config RUN/config.yaml --ckpt last.ckpt
  leakwatch attack --config RUN/config.yaml --ckpt last.ckpt
  leakwatch attack --from RUN --ckpt last.ckpt
  leakwatch compare-inits --config leakwatch:compare_inits
  leakwatch trade-off --config leakwatch:trade_off
  leakwatch reproduce lavp-table-1 --data mnist_sample
  leakwatch report runs/quickstart/version_0
  leakwatch compare runs/one runs/other --html runs.html
  leakwatch export runs/quickstart/version_0 values.csv

Exit status: 0 done, 1 it could not be done, 2 the command line or a config was not
understood, 3 a limit of `check` is broken. LEAKWATCH_DEBUG=1 shows the traceback of
an error.
"""


_PACKAGE: Final = str(Path(__file__).resolve().parents[1])
#: Errors whose text says what to do, whoever raised them.
_PLAIN: Final = (
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
    ModuleNotFoundError,
)
_DELIBERATE: Final = (ValueError, TypeError, OSError, ImportError, RuntimeError)

# Scaffolding around the one line of a jsonargparse message that says what is wrong.
_NOISE: Final = re.compile(
    r"Does not validate against|Subtypes:|Errors:|Given value|Expected a path but|"
    r"Expected a <class 'NoneType'>|Not a valid subclass|Subclass types expect|"
    r"a class path \(str\)|a dict with"
)
_KEY: Final = re.compile(r'Parser key "([^"]*)":\s*(.*)')
_CLASS: Final = re.compile(r"Problem with given class_path '([^']*)':")
# How jsonargparse prints one value inside of a class.
_NESTED: Final = re.compile(r"NestedArg\(key='?([\w.]+)'?, val=(.*?)\)")
_GIVEN: Final = re.compile(r"Given value: (.*)")
_OPTION: Final = re.compile(r"Option '(\w+)[^']*' is not accepted$")
_VAGUE: Final = "Expected a dot import path string"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Command line without the program's name; None: that of this process.

    Returns:
        Exit status: 0 done, 1 it could not be done, 2 the command line or a config
        was not understood, 3 a limit of ``check`` is broken.

    Example:
        >>> main(["report", "no/such/run"])
        1
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(_help(), end="", file=sys.stderr)
        return 2
    command = arguments[0]
    if command == "fit" and {"-h", "--help"} & set(arguments[1:]):
        print(fit_help(), end="")
        return 0
    if command == "fit" and "--help-all" in arguments[1:]:
        return _run(command, ["--help"])
    if command in ("-h", "--help"):
        print(_help(), end="")
        return 0
    if command == "--version":
        print(f"leakwatch {__version__}")
        return 0
    if command not in _COMMANDS:
        return _fail("leakwatch", unknown("command", command, _COMMANDS), 2)
    return _run(command, arguments[1:])


def _run(command: str, arguments: list[str]) -> int:
    if not arguments and _COMMANDS[command].missing:
        return _fail(f"leakwatch {command}", _COMMANDS[command].missing, 2)
    # The script's folder leads the path, not the current one, but a config may name
    # a user's class_path: my_module.MyModel.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        _COMMANDS[command].run(with_paths(arguments))
        sys.stdout.flush()
        return 0
    except BrokenPipeError:
        # Whoever read the output has seen enough: `leakwatch show RUN | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        sentence = explain(error)
        if sentence is None or os.environ.get("LEAKWATCH_DEBUG") == "1":
            raise
        misread = isinstance(error, argparse.ArgumentError)
        return _fail(f"leakwatch {command}", sentence, 2 if misread else 1)


def _help() -> str:
    width = max(map(len, _COMMANDS))
    commands = "\n".join(
        f"  {name:<{width}} {command.purpose}" for name, command in _COMMANDS.items()
    )
    return _USAGE.format(commands=commands)


def _fail(program: str, sentence: str, status: int) -> int:
    print(f"{program}: error: {sentence}", file=sys.stderr)
    return status


def explain(error: BaseException) -> str | None:
    """Say in one sentence what the user can correct.

    Args:
        error: What a command raised.

    Returns:
        The sentence, or None if this is not known to be a mistake of the user: then
        the traceback is what helps.

    Example:
        >>> explain(FileNotFoundError("there is no file x.ckpt"))
        'there is no file x.ckpt'
        >>> explain(ZeroDivisionError("division by zero")) is None
        True
    """
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    # jsonargparse wraps what a constructor raised; the innermost says it best.
    for cause in reversed(chain):
        if isinstance(cause, _DELIBERATE) and _raised_by_us(cause):
            return _one_line(str(cause))
    if isinstance(error, argparse.ArgumentError) or "Union subtypes" in str(error):
        return shorten(str(error))
    named = type(error).__name__ == "MisconfigurationException"
    if named or isinstance(error, _PLAIN):
        return _one_line(str(error))
    return None


def shorten(message: str) -> str:
    """Reduce a parser's message about nested types to the line that matters.

    Args:
        message: As jsonargparse words it, over many lines.

    Example:
        >>> print(shorten('''Parser key "model":
        ...   Does not validate against any of the Union subtypes
        ...   Errors:
        ...     - Problem with given class_path 'leakwatch.models.LitClassifier':
        ...         Option 'lrr' is not accepted
        ...     - Expected a <class 'NoneType'>'''))
        model: leakwatch.models.LitClassifier: Option 'lrr' is not accepted; did you \
mean 'lr'?
    """
    keys: list[str] = []
    owner, reason, given = "", "", ""
    for raw in message.splitlines():
        line = raw.strip().removeprefix("- ")
        if match := _GIVEN.match(line):
            given = given or match[1]
        if reason and not reason.startswith(_VAGUE):
            continue
        if match := _KEY.match(line):
            keys.append(match[1])
            line = match[2]
        elif match := _CLASS.match(line):
            owner, line = match[1], ""
        if line and not _NOISE.match(line):
            reason = reason if line.startswith(_VAGUE) and reason else line
    where = ".".join(keys)
    parts = [where, owner, reason + _near(owner, reason) or _one_line(message)]
    simple = given and not given.startswith(("NestedArg(", "{", "[", "Namespace("))
    if simple and "Got value" not in reason and not reason.endswith(given):
        parts[-1] += f", got {given}"
    return _NESTED.sub(r"\1=\2", ": ".join(part for part in parts if part))


def _near(owner: str, reason: str) -> str:
    """Which argument of a class was meant by one that it does not have."""
    option = _OPTION.search(reason)
    module, _, name = owner.rpartition(".")
    if option is None or not module:
        return ""
    try:
        had = inspect.signature(getattr(importlib.import_module(module), name))
    except Exception:  # what can't be looked at gives no hint
        return ""
    near = meant(option[1], had.parameters).strip()
    return f"; {near}" if near else ""


def _raised_by_us(error: BaseException) -> bool:
    """Whether a raise statement of this package made the error: a check that failed."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    file = trace.tb_frame.f_code.co_filename
    line = linecache.getline(file, trace.tb_lineno).strip()
    return file.startswith(_PACKAGE) and line.startswith("raise ")


def _one_line(text: str) -> str:
    return " ".join(text.split())
