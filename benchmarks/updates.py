"""Attacks on weight updates of several clients at once: what batching gains.

    OMP_NUM_THREADS=1 python benchmarks/updates.py [--part NAME] [--repeats 5]

Untrained networks on MNIST digits from the folder that ``LEAKWATCH_TEST_DATA`` names,
two local epochs, B = 10, learning rate 0.004, 8 clients. What attacks recover and how
DLFA's time grows are experiments: ``leakwatch reproduce sme-table-2`` and
``sme-table-3``.

``batch``: CPU seconds per step of one client after the other as published (double
backward, ``torch.optim.Adam``) and of all clients at once, in turns, the least of each.
``alpha``: what learning α adds to a step, medians of blocks in turns.
``runs``: CPU seconds of a whole attack on all clients at once, and of one after the
other, both ours, in turns, the least of each.
CPU time, because wall clocks show what else runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from leakwatch import WeightUpdate
from leakwatch.attacks import PixelScale, Start, SurrogateAttack, attack_update
from leakwatch.attacks.matching.priors import Priors
from leakwatch.attacks.matching.selection import opened
from leakwatch.attacks.updates.surrogate import SurrogateObjective
from leakwatch.derivatives import GradientMap
from leakwatch.federated import LocalTraining, client_updates, train_client
from leakwatch.models import FEMNISTCNN, MLP, SMELeNet

MEAN, STD = [0.1307], [0.3081]
PIXELS = PixelScale(MEAN, STD)
CLIENTS = 8
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "FEMNISTCNN": lambda: FEMNISTCNN(num_classes=10),
    "SMELeNet": SMELeNet,
    "MLP": MLP,
    "MLP1000": lambda: MLP(hidden_sizes=(1000, 1000)),
}


def digits() -> tuple[Tensor, Tensor]:
    """5,000 MNIST digits as network inputs, and their labels."""
    root = os.environ.get("LEAKWATCH_TEST_DATA")
    if root is None or not (Path(root) / "MNIST").is_dir():
        sys.exit("set LEAKWATCH_TEST_DATA to a folder that holds torchvision's MNIST.")
    from torchvision.datasets import MNIST

    data = MNIST(root, train=True, download=False)
    pixels = data.data[:5000, None].float() / 255
    return PIXELS.to_input(pixels), data.targets[:5000]


def simulated(net: nn.Module, samples: int) -> WeightUpdate:
    """What clients with random digits send."""
    x, y = digits()
    how = LocalTraining(2, batch_size=10, lr=0.004)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    rows = order[: CLIENTS * samples].view(CLIENTS, samples)
    sent = [train_client(net, x[r], y[r], how, client=i) for i, r in enumerate(rows)]
    return client_updates(sent)[0]


def published(net: nn.Module, update: WeightUpdate, client: int, x: Tensor) -> Callable:
    """A step of SME on one client as in the authors' code."""
    assert update.labels is not None
    y, w0, wT = update.labels[client], update.initial, update.final[client]
    named = dict(net.named_parameters())
    sizes = [p.numel() for p in named.values()]
    v = (w0 - wT).split(sizes)
    x = x.clone().requires_grad_()
    alpha = torch.tensor(0.5, requires_grad=True)
    adam = torch.optim.Adam([{"params": [x], "lr": 1.0}, {"params": [alpha]}])
    low, high = PIXELS.box(x)  # type: ignore[misc]

    def step() -> None:
        adam.zero_grad()
        w = (alpha * w0 + (1 - alpha) * wT).split(sizes)
        parts = {k: t.view_as(p) for (k, p), t in zip(named.items(), w, strict=True)}
        loss = nn.functional.cross_entropy(functional_call(net, parts, (x,)), y)
        g = torch.autograd.grad(loss, list(parts.values()), create_graph=True)
        dot = sum((a.flatten() * b).sum() for a, b in zip(g, v, strict=True))
        squares = sum(a.square().sum() for a in g)
        others = sum(b.square().sum() for b in v)
        d = 1 - dot / (squares.sqrt() * others.sqrt())
        tv = x.diff(dim=-1).abs().mean() + x.diff(dim=-2).abs().mean()
        (d + 0.005 * tv).backward()
        adam.step()
        with torch.no_grad():
            x.clamp_(low, high)
            alpha.clamp_(0, 1)

    return step


def ours(
    attack: SurrogateAttack, maps: GradientMap, update: WeightUpdate, steps: int
) -> float:
    """CPU seconds of an attack on all clients at once."""
    began = time.process_time()
    attack.changed(steps=steps).run(maps, update, pixels=PIXELS, start=Start.normal())
    return time.process_time() - began


def batch(args: argparse.Namespace) -> None:
    head = "published, one by one | SME, 8 at once | gain | IG, 8 at once | SME / IG"
    print(f"| network | N | {head} | as shipped / IG |\n|{'---|' * 8}")
    for name in args.networks:
        for samples in args.samples:
            build = NETWORKS[name]
            torch.manual_seed(0)
            net = build().eval()
            update = simulated(net, samples)
            starts = torch.randn(CLIENTS, samples, 1, 28, 28)
            loops = [published(net, update, i, starts[i]) for i in range(CLIENTS)]
            maps = GradientMap(net)
            rows: dict[str, list[float]] = {"plain": []}
            attacks = {
                "sme": SurrogateAttack(alpha_every=1),
                "ig": SurrogateAttack(alpha=1.0, alpha_lr=0.0),
                "every": SurrogateAttack(),
            }

            count = 8
            for _ in range(args.repeats):
                began = time.process_time()
                for loop in loops:
                    for _ in range(count // 4):
                        loop()
                rows["plain"].append((time.process_time() - began) / (count // 4))
                for key, attack in attacks.items():
                    more = ours(attack, maps, update, count + 1)
                    more -= ours(attack, maps, update, 1)
                    rows.setdefault(key, []).append(more / count)
            ms = {key: 1000 * min(v) for key, v in rows.items()}
            mid = {key: statistics.median(v) for key, v in rows.items()}
            print(
                f"| {name} | {samples} | {ms['plain']:.1f} ms | {ms['sme']:.1f} ms | "
                f"{ms['plain'] / ms['sme']:.2f} | {ms['ig']:.1f} ms | "
                f"{mid['sme'] / mid['ig']:.3f} | {mid['every'] / mid['ig']:.3f} |",
                flush=True,
            )


def alpha(args: argparse.Namespace) -> None:
    """What learning α costs: as many steps of each in turns, without the optimiser."""
    print(f"| network | N | IG | SME / IG | as published / IG |\n|{'---|' * 5}")
    clients, steps = torch.arange(CLIENTS), SurrogateAttack().alpha_every
    for name in args.networks:
        for samples in args.samples:
            torch.manual_seed(0)
            net = NETWORKS[name]().eval()
            update = simulated(net, samples)
            assert update.labels is not None
            maps = GradientMap(net)
            x = torch.randn(CLIENTS, samples, 1, 28, 28)
            half = torch.full((CLIENTS,), 0.5)
            taken: dict[int, list[float]] = {0: [], steps: []}
            taken[1] = []
            with opened(maps) as path_for:
                made = {
                    every: SurrogateObjective(
                        maps, update, update.labels, path_for, Priors(), every=every
                    )
                    for every in taken
                }
                for block in range(args.repeats * 10 + 1):
                    for every, objective in made.items():
                        began = time.process_time()
                        for step in range(steps):
                            objective(x, half, clients, step)
                        if block:  # the first tries the path out
                            taken[every].append(time.process_time() - began)
            ig, usual, published = (statistics.median(t) for t in taken.values())
            print(
                f"| {name} | {samples} | {1000 * ig / steps:.1f} ms | "
                f"{usual / ig:.3f} | {published / ig:.3f} |",
                flush=True,
            )


def runs(args: argparse.Namespace) -> None:
    print("| network | N | 8 runs of one | one run of 8 | gain |")
    print("|---|---|---|---|---|")
    for name in args.networks:
        for samples in args.samples:
            torch.manual_seed(0)
            net = NETWORKS[name]().eval()
            update = simulated(net, samples)
            assert update.labels is not None
            named = zip(
                update.final, update.labels, update.index or range(CLIENTS), strict=True
            )
            alone = [
                replace(update, final=w[None], labels=y[None], index=(i,))
                for w, y, i in named
            ]
            rows: dict[str, list[float]] = {"alone": [], "at once": []}
            for _ in range(args.repeats):
                for key, updates in (("alone", alone), ("at once", [update])):
                    began = time.process_time()
                    for given in updates:
                        attack_update(net, given, steps=50, mean=MEAN, std=STD)
                    rows[key].append(time.process_time() - began)
            one, many = min(rows["alone"]), min(rows["at once"])
            print(
                f"| {name} | {samples} | {one:.2f} s | {many:.2f} s | "
                f"{one / many:.2f} |",
                flush=True,
            )


PARTS = {"batch": batch, "alpha": alpha, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("all", *PARTS), default="all")
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 2, 10])
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name, part in PARTS.items():
        if args.part in (name, "all"):
            print(f"\n{name}\n")
            part(args)


if __name__ == "__main__":
    main()
