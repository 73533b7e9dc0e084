"""One product with H = JᵀJ: from a graph of the batch, and one product at a time.

    taskset -c 1 python benchmarks/products.py                      # CPU ms, one thread
    taskset -c 1 python benchmarks/products.py --networks lenet vgg9 --batch 16

Old: J v and then Jᵀu by ``GradientMap.jvp`` and ``vjp``, which go by ``vmap``, or
sample by sample where that fails. New: what ``GradientJacobian.normal`` gives to a
solver. Both run in turn in one process, at the same samples and directions. What a
solver pays before its first new product (examining layers, making the graph, comparing
with an old product) is in a column of its own. Networks are untrained, images uniform
noise.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from leakwatch import GradientJacobian
from leakwatch.derivatives import GradientMap
from leakwatch.models import build_model, initialize

NETWORKS: dict[str, tuple[str, int, int, dict[str, object]]] = {
    "lenet": ("lenet", 1, 28, {"activation": "sigmoid"}),
    "mlp": ("mlp", 1, 28, {"hidden_sizes": (1000, 1000)}),
    "resnet8": ("resnet8", 3, 32, {}),
    "vgg9": ("vgg9", 3, 32, {}),
    "resnet18": ("resnet18", 3, 32, {}),
    "shufflenet": ("shufflenet_v2", 3, 32, {}),
    "vit": ("sme_vit", 3, 32, {}),
    "lstm": ("", 1, 28, {}),
}


class Rows(nn.Module):
    """An LSTM with 64 units over the rows of an image; ``vmap`` can't batch it."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.LSTM(28, 64, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.core(x[:, 0])[0][:, -1])


def row(name: str, batch: int, repeats: int) -> str:
    """CPU ms per product and sample of one network."""
    model, channels, size, options = NETWORKS[name]
    torch.manual_seed(0)
    net: nn.Module = Rows()
    if model:
        net = build_model(
            model,
            in_channels=channels,
            num_classes=10,
            image_size=size,
            model_args=options,
        )
    if options.get("activation") == "sigmoid":
        initialize(net, "uniform", seed=0)
    x = torch.rand(batch, channels, size, size)
    y = torch.arange(batch) % 10
    at = GradientMap(net)
    j = GradientJacobian(at, x, y)
    w = 1 / j.scale.float()
    operator = j.normal()
    v, u = (torch.randn(batch, n) for n in (operator.size, operator.rows))

    def old() -> Tensor:
        return at.vjp(x, y, at.jvp(x, y, v, w), w)

    expected = old()
    first, found = timed(lambda: operator.matvec(v))
    gap = float((found - expected).norm() / expected.norm())
    taken: dict[str, list[float]] = {}
    for _ in range(repeats):
        for what, product in (
            ("old", old),
            ("new", lambda: operator.matvec(v)),
            ("push", lambda: operator.forward(v)),
            ("pull", lambda: operator.backward(u)),
        ):
            taken.setdefault(what, []).append(timed(product)[0])
    ms = {k: 1e3 / batch * statistics.median(t) for k, t in taken.items()}
    halves = ms["push"] + ms["pull"]
    return (
        f"| {name} | {at.size:,} | {at.path}: {ms['old']:.3g} | {j.products.way}: "
        f"{ms['new']:.3g} | {ms['old'] / ms['new']:.1f} | {halves:.3g} | "
        f"{ms['old'] / halves:.1f} | {1e3 / batch * first:.3g} | {gap:.0e} |"
    )


def timed(f: Callable[[], Tensor]) -> tuple[float, Tensor]:
    started = time.process_time()
    out = f()
    return time.process_time() - started, out


def main() -> None:
    """Prints the table of docs/measurements/speed.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        "| | d_θ | old: H v | new: H v | faster | new: J v and Jᵀu | faster | first "
        "new product | differ by |\n|---|---|---|---|---|---|---|---|---|"
    )
    for name in args.networks:
        print(row(name, args.batch, args.repeats), flush=True)


if __name__ == "__main__":
    main()
