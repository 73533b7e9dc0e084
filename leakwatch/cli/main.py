"""Choosing a command, and turning mistakes into one sentence and an exit code.

Nothing heavy is imported before a command needs it: ``leakwatch --help`` and
``leakwatch report`` take a fraction of a second, torch alone takes several.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Final

from leakwatch import __version__
from leakwatch.cli.errors import explain

#: What each command does, for the help; its module has a function ``run(argv)``.
_COMMANDS: Final = {
    "fit": "train a model and watch what its gradients give away",
    "audit": "score a finished checkpoint once",
    "attack": "invert gradients under a checkpoint, and compare with its scores",
    "compare-inits": "compare initialisations by what they give away",
    "trade-off": "compare defenses by what they cost and what they buy",
    "report": "rebuild report.html from a recorded run",
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
  leakwatch fit --config configs/quickstart.yaml
  leakwatch audit --config RUN/config.yaml --ckpt last.ckpt
  leakwatch attack --config RUN/config.yaml --ckpt last.ckpt
  leakwatch compare-inits --config configs/compare_inits.yaml
  leakwatch trade-off --config configs/trade_off.yaml
  leakwatch report runs/quickstart/version_0

Exit status: 0 done, 1 it could not be done, 2 the command line or a config was not
understood. LEAKWATCH_DEBUG=1 shows the traceback of an error.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Command line without the program's name; None: that of this process.

    Returns:
        Exit status: 0 done, 1 it could not be done, 2 the command line or a config
        was not understood.

    Example:
        >>> main(["report", "no/such/run"])
        1
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(_help(), end="", file=sys.stderr)
        return 2
    command = arguments[0]
    if command in ("-h", "--help"):
        print(_help(), end="")
        return 0
    if command == "--version":
        print(f"leakwatch {__version__}")
        return 0
    if command not in _COMMANDS:
        return _fail("leakwatch", _unknown(command), 2)
    return _run(command, arguments[1:])


def _run(command: str, arguments: list[str]) -> int:
    # The script's folder leads the path, not the current one, but a config may name
    # a user's class_path: my_module.MyModel.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(f"leakwatch.cli.{command.replace('-', '_')}")
        status: int = module.run(arguments)
        return status
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
        f"  {name:<{width}} {what}" for name, what in _COMMANDS.items()
    )
    return _USAGE.format(commands=commands)


def _unknown(command: str) -> str:
    close = difflib.get_close_matches(command, _COMMANDS, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown command {command!r}; {meant}commands: {', '.join(_COMMANDS)}."


def _fail(program: str, sentence: str, status: int) -> int:
    print(f"{program}: error: {sentence}", file=sys.stderr)
    return status
