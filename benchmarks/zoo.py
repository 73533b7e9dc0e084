"""Is J right on other people's networks? Every torchvision classifier, many of timm.

    python benchmarks/zoo.py [--only PATTERN] [--json FILE] [--seconds 300]

Each architecture runs in a process of its own with limits of CPU time and memory, at
the smallest input at which it classifies, in float64 and eval mode. J·v through
``leakwatch.GradientMap`` is compared with central differences of gradients by
plain autograd, parameter by parameter, on two samples with directions of their own; Jᵀu
through ⟨u, J v⟩ = ⟨Jᵀu, v⟩. Outcomes:

- ``right``: every parameter's part of J·v agrees with a difference that two steps and
  both sides agree on, the gradient agrees to 1e-6, and the adjoint identity holds to
  1e-8. Of a network that computes in float32 inside, all that is said of it without
  those conversions, and J·v with them is the same to 1e-3.
- ``refused``: the library raised, with the reason that is shown.
- ``wrong``: it returned something else than the differences.
- ``unclear``: no step gives a difference that settles some parameter.
- ``failed``: time, memory or a crash; ``no input``: the network itself runs at no size.
- ``skipped``: more than ``--max-params`` parameters.

Networks with more than ``--train-at-most`` parameters have their largest tensors
frozen, so that fewer gradients are held; derivatives still flow through the whole
network. The column ``d_θ`` says how many took part. Times are CPU seconds: the whole
check, the first gradient with the examination before it, and one J·v of two samples.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import resource
import signal
import time
import warnings
from collections import Counter
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from zoo_checks import Verdict, check
from zoo_models import build, catalogue, freeze_largest

_GIB = 2**30
_OUTCOMES = (
    "right",
    "refused",
    "wrong",
    "unclear",
    "failed",
    "no input",
    "skipped",
)


def examined(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Builds one architecture and checks it, in the process that calls."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    started = time.process_time()
    try:
        net, size = build(name, args.smallest)
    except RuntimeError as error:
        return {"outcome": "no input", "reason": str(error)}
    row: dict[str, Any] = {"size": size}
    row["parameters"] = sum(p.numel() for p in net.parameters())
    if row["parameters"] > args.max_params:
        return row | {"outcome": "skipped", "reason": "too large here"}
    freeze_largest(net, args.train_at_most)
    net = net.double()
    row["d_theta"] = sum(p.numel() for p in net.parameters() if p.requires_grad)
    row["build_s"] = time.process_time() - started
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    verdict: Verdict = check(net, x, torch.tensor([3, 7]), args.directions)
    row |= asdict(verdict)
    row["seconds"] = time.process_time() - started
    row["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB
    return row


def _child(name: str, args: argparse.Namespace, pipe: Connection) -> None:
    memory, seconds = int(args.gib * _GIB), int(args.seconds)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    try:
        row = examined(name, args)
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        row = {"outcome": "failed", "reason": f"{type(error).__name__}: {text[0]}"}
    pipe.send(row)


def alone(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The row of one architecture, whatever happens to the process that makes it."""
    # Forked children share the imports, which take longer than many a network.
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, args, theirs))
    process.start()
    theirs.close()
    try:
        row: dict[str, Any] = ours.recv()
    except EOFError:
        process.join()
        killed = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        reason = f"not done in {args.seconds:.0f} s of CPU time" if killed else ""
        reason = reason or f"its process died (exit code {process.exitcode})"
        row = {"outcome": "failed", "reason": reason}
    process.join()
    return {"name": name} | row


def line(row: dict[str, Any]) -> str:
    """One architecture in one line."""

    def number(key: str, form: str) -> str:
        value = row.get(key)
        return "–" if value is None or value != value else format(value, form)

    parameters, trained = row.get("parameters", 0), row.get("d_theta", 0)
    text = (
        f"{row['name']:44}{row.get('size', '–'):>5}{parameters / 1e6:8.1f}"
        f"{trained / 1e6:8.1f}  {row.get('path', '–'):6}{row['outcome']:9}"
        f"{number('jvp_error', '.0e'):>7}{number('adjoint_error', '.0e'):>7}"
        f"{number('first_s', '.1f'):>8}{number('product_s', '.2f'):>8}"
        f"{number('seconds', '.0f'):>6}{number('peak_gib', '.1f'):>6}"
    )
    said = [row.get("reason", ""), *(f"note: {n}" for n in row.get("notes", ()))]
    return "\n      ".join([text, *(s for s in said if s)])


HEADER = (
    f"{'architecture':44}{'input':>5}{'M par.':>8}{'M d_θ':>8}  {'path':6}{'outcome':9}"
    f"{'J·v':>7}{'Jᵀu':>7}{'first s':>8}{'J·v s':>8}{'s':>6}{'GiB':>6}"
)


def summary(rows: list[dict[str, Any]]) -> str:
    """Counts per library and outcome."""
    lines = []
    libraries = sorted({row["name"].split("/")[0] for row in rows}, reverse=True)
    for library in libraries:
        mine = [row for row in rows if row["name"].startswith(library + "/")]
        counts = Counter(row["outcome"] for row in mine)
        paths = Counter(row["path"] for row in mine if row["outcome"] == "right")
        share = 100 * counts["right"] / len(mine)
        parts = [f"{counts[o]} {o}" for o in _OUTCOMES if counts[o]]
        ways = ", ".join(f"{n} by {path}" for path, n in sorted(paths.items()))
        lines.append(
            f"{library}: {len(mine)} architectures: {', '.join(parts)} "
            f"({share:.1f} % right: {ways or 'none'})"
        )
    return "\n".join(lines)


_COLUMNS = {
    "architecture": ("name", ""),
    "input": ("size", ""),
    "parameters, M": ("parameters", ".1f"),
    "d_θ, M": ("d_theta", ".1f"),
    "path": ("path", ""),
    "outcome": ("outcome", ""),
    "J·v": ("jvp_error", ".0e"),
    "Jᵀu": ("adjoint_error", ".0e"),
    "s": ("seconds", ".0f"),
}


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of ``docs/measurements/coverage.md``."""

    def cell(row: dict[str, Any], key: str, form: str) -> str:
        value = row.get(key)
        if value is None or value != value:
            return "–"
        return format(value / 1e6 if key in ("parameters", "d_theta") else value, form)

    lines = [_COLUMNS, ["---"] * len(_COLUMNS)]
    lines += [[cell(row, *column) for column in _COLUMNS.values()] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    """Runs the architectures whose names match and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="regular expression on lib/name")
    parser.add_argument("--json", type=Path, help="rows, added to those in the file")
    parser.add_argument("--markdown", type=Path, help="table of all rows in --json")
    parser.add_argument("--seconds", type=float, default=300, help="CPU time for each")
    parser.add_argument("--gib", type=float, default=12, help="memory limit for each")
    parser.add_argument("--max-params", type=float, default=400e6)
    parser.add_argument("--train-at-most", type=float, default=10e6)
    parser.add_argument("--smallest", type=int, default=32, help="first size tried")
    parser.add_argument("--directions", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    known: dict[str, dict[str, Any]] = {}
    if args.json and args.json.exists():
        known = {row["name"]: row for row in json.loads(args.json.read_text())}
    rows = []
    print(HEADER)
    for name in catalogue():
        if not re.search(args.only, name):
            continue
        rows.append(alone(name, args))
        print(line(rows[-1]), flush=True)
        if args.json:
            known[name] = rows[-1]
            args.json.write_text(json.dumps([*known.values()], indent=1))
    if args.markdown:
        order = [name for name in catalogue() if name in known]
        table = markdown([known[name] for name in order] if args.json else rows)
        args.markdown.write_text(table + "\n")
    print(summary(rows))


if __name__ == "__main__":
    main()
