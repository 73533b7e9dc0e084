"""Operations and synchronisations: what a GPU spends its time on where work is small.

    python benchmarks/device_counts.py [--device cuda] [--size 16] [--samples 8]
        [--only scores attacks]

Counted by a ``TorchDispatchMode``: every operation on the device, those that
make the CPU wait for a device (reading a number, positions of a mask, copies from the
device, eigensolvers), and copies to the device, which it waits for as well; an index
that is on the CPU is one. Where a call takes steps, a row is the
difference between many steps and few, for each step. On the CPU nothing is copied
between devices, so only numbers that are read are counted as synchronisations there.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import leakwatch
from leakwatch.models import LeNet, initialize
from leakwatch.scores import Score, resolve

# The kernels of these look at numbers to know their result, or report an error.
WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "_linalg_eigh",
    "_linalg_svd",
    "linalg_cholesky",
}
# Presets whose steps are counted, and where they begin.
ATTACKS = {
    "inverting-gradients": "near",
    "dlg": "near",
    "ci-net": "normal",
    "gauss-newton": "near",
}
# These bring indices that are elsewhere to the device.
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
VIEWS = {"view", "_unsafe_view", "expand", "detach", "t", "transpose", "slice", "alias"}


class Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is done on a device while it is entered.

    Args:
        device: type of the device.

    Attributes:
        operations: all but views.
        synchronisations: those for which the CPU waits.
        copies: from the CPU to the device.
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.operations = self.synchronisations = self.copies = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs the operation and counts it."""
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        places = {
            leaf.device.type
            for leaf in tree_leaves((args, kwargs, out))
            if isinstance(leaf, Tensor)
        }
        if name in VIEWS or self.device not in places:
            return out
        self.operations += 1
        self.synchronisations += name in WAITING
        if name in INDEXING:
            self.copies += sum(t.device.type == "cpu" for t in tree_leaves(args[1]))
        if name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            there, here = out.device.type, source.device.type
            self.synchronisations += there == "cpu" != here
            self.copies += here == "cpu" != there
        return out


def counted(call: Callable[[], object], device: str) -> tuple[int, int, int]:
    """Operations, synchronisations and copies of a call that has been made before."""
    call()
    with Counts(device) as counts:
        call()
    return counts.operations, counts.synchronisations, counts.copies


def main() -> None:
    """Counts and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=16, help="pixels along an edge")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="of attacks")
    kinds = ("scores", "attacks")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    args = parser.parse_args()
    torch.manual_seed(0)
    net = LeNet(image_size=args.size).to(args.device)
    initialize(net, "uniform", seed=0)
    n = args.samples
    x = torch.rand(n, 1, args.size, args.size).to(args.device)
    y = (torch.arange(n) % 10).to(args.device)
    print(f"LeNet, {n} × 1×{args.size}×{args.size} on {args.device}")
    print(f"{'per':44}{'operations':>12}{'synchronisations':>18}{'copies':>8}")

    def row(name: str, per: float, *numbers: int) -> None:
        each = [number / per for number in numbers]
        print(f"{name:44}{each[0]:12.0f}{each[1]:18.2f}{each[2]:8.2f}", flush=True)

    for name, per, call in _scores(net, x, y) if "scores" in args.only else ():
        row(name, per, *counted(call, x.device.type))
    few, many = 2, 2 + args.steps
    for preset, start in ATTACKS.items() if "attacks" in args.only else ():

        def attacked(steps: int, preset: str = preset, start: str = start) -> object:
            return leakwatch.attack(
                net, x, y, preset, steps=steps, restarts=1, start=start
            )

        counts = [
            counted(functools.partial(attacked, steps), x.device.type)
            for steps in (few, many)
        ]
        differences = [b - a for a, b in zip(*counts, strict=True)]
        row(f"{preset}, step of {n} attacks", args.steps, *differences)


def _without_range(score: Score) -> bool:
    return "range" not in score.needs


def _scores(
    net: nn.Module, x: Tensor, y: Tensor
) -> list[tuple[str, float, Callable[[], object]]]:
    exact, every = (
        [s for s in resolve(["lavp", "i2f", "bayes", "norms", *more]) if keep(s)]
        for more, keep in (((), _without_range), (("range",), lambda _: True))
    )
    size = sum(p.numel() for p in net.parameters())
    delta = torch.full((len(x), size), 1e-3, device=x.device)

    def found(scores: Sequence[str | Score], **options: Any) -> Callable[[], object]:
        return lambda: leakwatch.score(net, x, y, scores, noise_std=1e-2, **options)

    return [
        ("exact scores, sample", len(x), found(exact)),
        ("the same with the range of pixels, sample", len(x), found(every)),
        ("λ_1, call", 1, found(["lavp_l2_max"])),
        ("matrix-free scores, call", 1, found(exact, solver="lanczos", products=40)),
        (
            "damped I²F for a given δ, call",
            1,
            found(["i2f"], solver="lanczos", products=40, delta=delta),
        ),
    ]


if __name__ == "__main__":
    main()
