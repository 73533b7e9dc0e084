"""Can one gradient stand for many local steps? Figures 3 and 4 of SME, measured.

    python benchmarks/update_analysis.py [--clients 8] [--rounds 0 20] [--out FOLDER]

Clients of N test digits train the CNN for FEMNIST from the weights that a federation
has reached after some rounds. For each setting (E, B): the least share of a step's
gradient of all samples, as a norm, that lies in the plane of the first two principal
directions (Tables 1, 4 and 5 of Zhu, Yao & Blaschko, ICML 2023), and the cosine between
w_0 − w_T and the gradient at αw_0 + (1−α)w_T, at w_0, at w_T and at the best α. Mean
and standard deviation over clients; the curves of the first client below each table.
With ``--out`` all curves go to a CSV file; ``--settings 10,50 10,10`` measures some.

The images are found through the environment variable ``LEAKWATCH_TEST_DATA``, a folder
with ``MNIST/raw``.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from federations import LR, accuracy, digits, federation
from torch import Tensor, nn

from leakwatch.federated import (
    LocalTraining,
    Record,
    Segment,
    Subspace,
    fixed_split,
    principal_subspace,
    segment_similarity,
    train_client,
)

# Published settings (E, B) of Tables 1, 2 and 4: the last two take T = 50 steps at
# N = 50, as (50, 50) and (10, 10) do.
SETTINGS = (
    (10, 50),
    (20, 50),
    (50, 50),
    (10, 10),
    (20, 10),
    (50, 10),
    (25, 25),
    (5, 5),
)


@dataclass(frozen=True)
class Measured:
    """One client in one setting."""

    subspace: Subspace
    segment: Segment


def measure(
    net: nn.Module, x: Tensor, y: Tensor, how: LocalTraining, client: int
) -> Measured:
    """Both analyses of one client."""
    # A step on all samples has their gradient anyway.
    record: Record = "steps" if how.batch_size >= len(x) else "full"
    update = train_client(net, x, y, how, client=client, record=record)
    assert update.recorded is not None
    return Measured(
        principal_subspace(update.recorded), segment_similarity(net, update, points=11)
    )


def spread(values: Sequence[float]) -> str:
    found = torch.tensor(values, dtype=torch.float64)
    deviation = float(found.std()) if len(found) > 1 else float("nan")
    return f"{float(found.mean()):.3f} ± {deviation:.3f}"


def row(how: LocalTraining, samples: int, found: Sequence[Measured]) -> str:
    columns = (
        [f.subspace.worst for f in found],
        [f.subspace.total for f in found],
        [f.segment.at_start for f in found],
        [f.segment.at_end for f in found],
        [f.segment.best for f in found],
        [f.segment.best_alpha for f in found],
    )
    steps = how.steps(samples)
    cells = [str(how.epochs), str(how.batch_size), str(steps), *map(spread, columns)]
    return f"| {' | '.join(cells)} |"


def curves(how: LocalTraining, first: Measured) -> str:
    ratios = first.subspace.ratios
    some = torch.linspace(0, len(ratios) - 1, 6).round().long()
    along = " ".join(f"{float(ratios[t]):.3f}" for t in some)
    over = " ".join(f"{float(c):.3f}" for c in first.segment.similarity)
    return (
        f"E={how.epochs}, B={how.batch_size}, first client: in the plane at steps "
        f"{some.tolist()}: {along}; cosine at α = 0, 0.1 … 1: {over}"
    )


def write(path: Path, results: dict[tuple[int, LocalTraining], list[Measured]]) -> None:
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["round", "E", "B", "client", "curve", "at", "value"])
        for (number, how), found in results.items():
            for client, one in enumerate(found):
                key = [number, how.epochs, how.batch_size, client]
                pairs = zip(one.segment.alphas, one.segment.similarity, strict=True)
                for alpha, cosine in pairs:
                    table.writerow([*key, "cosine", float(alpha), float(cosine)])
                for t, ratio in enumerate(one.subspace.ratios.tolist()):
                    table.writerow([*key, "in the plane", t, ratio])


def pair(text: str) -> tuple[int, int]:
    """E and B from ``"10,50"``."""
    epochs, batch = text.split(",")
    return int(epochs), int(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--samples", type=int, default=50, help="N of each client")
    parser.add_argument("--rounds", type=int, nargs="+", default=[0, 20])
    parser.add_argument(
        "--settings", type=pair, nargs="+", default=SETTINGS, help="E,B of each"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for update_analysis.csv")
    args = parser.parse_args()

    x, y = digits(train=False)
    parts = fixed_split(len(x), args.clients, args.samples, seed=args.seed)
    server = federation(args.seed)
    results: dict[tuple[int, LocalTraining], list[Measured]] = {}
    for number in sorted(args.rounds):
        list(server.run(number - server.completed))
        right = accuracy(server.module)
        print(f"\nafter {number} rounds, test accuracy {right:.1%}\n")
        print(
            "| E | B | T | least in the plane | Σ in the plane | cos at w_0 | "
            "cos at w_T | best cos | best α |\n|---|---|---|---|---|---|---|---|---|"
        )
        started, lines = time.process_time(), []
        for epochs, batch in args.settings:
            how = LocalTraining(epochs, batch, LR)
            found = [
                measure(server.module, x[part], y[part], how, client)
                for client, part in enumerate(parts)
            ]
            results[number, how] = found
            print(row(how, args.samples, found), flush=True)
            lines.append(curves(how, found[0]))
        print("\n" + "\n".join(lines))
        print(f"{time.process_time() - started:.0f} CPU seconds")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        write(args.out / "update_analysis.csv", results)


if __name__ == "__main__":
    main()
