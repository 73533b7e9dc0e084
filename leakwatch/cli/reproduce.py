"""``leakwatch reproduce``: tables and figures of papers, by one command each."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from leakwatch.names import unknown

_LIST, _ALL, _PAGES = "list", "all", "pages"
_OUTPUT: Final = "leakwatch-reproduction"


def reproduce(argv: list[str]) -> None:
    """List experiments, run some, or write their results into documents.

    Args:
        argv: Command line after ``leakwatch reproduce``.

    Raises:
        argparse.ArgumentError: The command line can't be understood.
        FileNotFoundError: A data set is missing; says which and what to do.
        ValueError: There is no such experiment, or its settings are wrong.
    """
    parser = _parser()
    asked = parser.parse_args(argv)
    # Here, as the rest below, because torch takes seconds.
    from leakwatch.reproduction.experiment import names

    if asked.names == [_LIST]:
        print(_listed(asked))
        return
    if asked.names == [_PAGES]:
        from leakwatch.reproduction.pages import collect, write_pages

        if found := collect(asked.output, asked.docs):
            print(f"results of {', '.join(found)} from {asked.output}")
        for path in write_pages(asked.docs):
            print(f"wrote {path}")
        return
    known = names()
    wanted = known if asked.names == [_ALL] else asked.names
    _check(asked)
    for name in wanted:
        if name not in known and not name.endswith((".yaml", ".yml")):
            raise ValueError(unknown("experiment", name, [*known, _LIST, _ALL, _PAGES]))
    left: list[str] = []
    for name in wanted:
        try:
            _run(name, asked)
        except Exception as error:
            # Hours of others must not be lost, and these may have their data.
            if len(wanted) == 1:
                raise
            expected = isinstance(error, FileNotFoundError | ValueError)
            kind = "" if expected else f"{type(error).__name__}: "
            said = str(error) if str(error).startswith(name) else f"{name}: {error}"
            print(f"\n{kind}{said}")
            left.append(name)
    if left:
        raise RuntimeError(
            f"{len(left)} of {len(wanted)} experiments were not finished, for the "
            f"reasons above: {', '.join(left)}."
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="leakwatch reproduce",
        description="Repeat tables and figures of the papers that leakwatch is built "
        "on, and set the paper's numbers beside ours.",
        epilog="leakwatch reproduce list; leakwatch reproduce lavp-table-1; leakwatch "
        "reproduce all --jobs 2; leakwatch reproduce lavp-table-1 --scale paper "
        "--cells 2. Run the same command again to go on where it was killed.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument(
        "names",
        nargs="+",
        metavar="NAME",
        help="experiments, YAML files of your own, `all`, `list`, or `pages` to write "
        "results into documents",
    )
    parser.add_argument(
        "--scale",
        choices=("small", "paper"),
        default="small",
        help="small: up to an hour each on one CPU core; paper: the paper's settings",
    )
    parser.add_argument(
        "--data", help="a data set to run on instead of the paper's, as mnist_sample"
    )
    parser.add_argument(
        "--data-dir", default="data", help="folder of the data sets (default: data)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(_OUTPUT),
        help=f"folder of results and finished cells (default: {_OUTPUT})",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        help="processes that compute cells (default: 1)",
    )
    parser.add_argument("--device", default="cpu", help="such as cuda (default: cpu)")
    parser.add_argument(
        "--cells",
        type=int,
        metavar="N",
        help="only time pieces of N cells of each part; says how long all would take",
    )
    parser.add_argument(
        "--wandb",
        choices=("offline", "online"),
        help="also log tables and figures to W&B, in a group of the paper's name",
    )
    parser.add_argument(
        "--docs",
        type=Path,
        default=Path("docs/reproduction"),
        help="folder of the documents that `pages` writes into",
    )
    return parser


def _check(asked: argparse.Namespace) -> None:
    """Find what would fail only after data are loaded and networks trained."""
    import torch

    if asked.jobs is not None and asked.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {asked.jobs}.")
    if asked.cells is not None and asked.cells < 1:
        raise ValueError(f"--cells must be at least 1, got {asked.cells}.")
    try:
        torch.empty(0, device=asked.device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(
            f"--device {asked.device} can't be used: {why}; for instance --device cpu."
        ) from None
    output: Path = asked.output
    taken = next((p for p in (output, *output.parents) if p.exists()), None)
    if taken is not None and not taken.is_dir():
        raise ValueError(f"--output must be a folder, and {taken} is a file.")


def _run(name: str, asked: argparse.Namespace) -> None:
    from leakwatch.reproduction import estimate, read, reproduce
    from leakwatch.reproduction.run import page

    experiment = read(name)
    where: dict[str, Any] = {
        "scale": asked.scale,
        "root": asked.data_dir,
        "data": asked.data,
        "device": asked.device,
    }
    if asked.cells is not None:
        print(f"{name}: {estimate(experiment, most=asked.cells, **where)}")
        return
    print(f"\n{name}: {experiment.item}, {experiment.title}\n")
    result, folder = reproduce(
        experiment,
        output=asked.output,
        n_jobs=asked.jobs,
        say=lambda line: print(line, flush=True),
        **where,
    )
    print(f"\n{page(experiment, result)}\nrecorded in: {folder}")
    if asked.wandb is not None:
        from leakwatch.reproduction.tracking import log

        log(experiment, result, folder, asked.wandb)


def _listed(asked: argparse.Namespace) -> str:
    from leakwatch.reproduction.experiment import names, place_of, read

    head = ["name", "item", "minutes", "done", "claim"]
    rows: list[list[Any]] = []
    for name in names():
        experiment = read(name)
        place = place_of(name, asked.scale, asked.data, asked.output)
        minutes = "?" if experiment.minutes is None else f"{experiment.minutes:g}"
        done = "yes" if (place / "result.json").is_file() else "no"
        item = f"{experiment.paper}, {experiment.item}"
        rows.append([name, item, minutes, done, experiment.claim])
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head) - 1)]
    lines = [
        "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]])
        for row in [head, *rows]
    ]
    return "\n".join(lines) + "\n\nminutes: of one CPU core at small scale, at most."
