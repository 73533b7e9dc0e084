"""Each way to J v, Jᵀu, H or an attack's step against the next simpler one, in turns.

    taskset -c 1 python benchmarks/ways.py
    taskset -c 1 python benchmarks/ways.py --only ranged --repeats 3

CPU seconds of one thread in one process, because wall clocks show what else runs on a
machine. Networks are untrained, images noise. A step is the distance of all attacks and
its derivative in their images.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import torch
from torch import Tensor, nn
from torch.func import vmap

from leakwatch import GradientJacobian, WeightUpdate
from leakwatch.attacks import SharedGradient
from leakwatch.attacks.matching.objective import MatchingProblem, PathName
from leakwatch.attacks.matching.priors import Priors
from leakwatch.attacks.matching.selection import UpdatePathName, opened
from leakwatch.attacks.updates import surrogate
from leakwatch.derivatives import GradientMap, autodiff
from leakwatch.derivatives.gram import gram as grams
from leakwatch.derivatives.gram import sources
from leakwatch.models import build_model

NETWORKS: dict[str, tuple[str, int, int, dict[str, object]]] = {
    "LeNet, sigmoid": ("lenet", 1, 28, {"activation": "sigmoid"}),
    "LeNet, sigmoid, 3×32×32": ("lenet", 3, 32, {"activation": "sigmoid"}),
    "LeNet, ReLU": ("lenet", 1, 28, {"activation": "relu"}),
    "MLP (1000, 1000), sigmoid": (
        "mlp",
        1,
        28,
        {"hidden_sizes": (1000, 1000), "activation": "sigmoid"},
    ),
    "MLP (1000, 1000), ReLU": ("mlp", 1, 28, {"hidden_sizes": (1000, 1000)}),
    "ResNet8, ReLU": ("resnet8", 3, 32, {}),
    "VGG9, ReLU": ("vgg9", 3, 32, {}),
    "ResNet8, GELU": ("resnet8", 3, 32, {"activation": "gelu"}),
    "ResNet18, ReLU, 1×14×14": ("resnet18", 1, 14, {}),
    "a small ViT": ("sme_vit", 3, 32, {}),
    "MLP, 3×32×32": ("mlp", 3, 32, {}),
    "MLP, 1×28×28": ("mlp", 1, 28, {}),
    "SMELeNet": ("sme_lenet", 1, 28, {}),
}


# MiB kept of J, or of what stands for it; beyond that, more passes are made.
_MEMORY = 4096


def network(name: str, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A network and samples for it."""
    model, channels, size, options = NETWORKS[name]
    torch.manual_seed(0)
    net = build_model(
        model,
        in_channels=channels,
        num_classes=10,
        image_size=size,
        model_args=options,
    )
    return net, torch.rand(batch, channels, size, size), torch.arange(batch) % 10


def single(name: str, batch: int, back: bool) -> dict[str, Callable[[], Tensor]]:
    """J v of each sample of a batch, or Jᵀu, in the ways of ``autodiff``."""
    net, x, y = network(name, batch)
    at = GradientMap(net)
    size = at(x, y).shape[1]
    w = torch.ones(batch)
    v = torch.randn(batch, size) if back else torch.randn_like(x)

    def batched(product: autodiff.Product) -> Tensor:
        with at.evaluation(x) as weights:

            def one(*sample: Tensor) -> Tensor:
                return product(at.sample_loss, weights, *sample)

            found: Tensor = vmap(one, chunk_size=at.chunk(weights))(x, y, w, v)
            return found

    def loop() -> Tensor:
        product = autodiff.pulled_by_graph if back else autodiff.pushed_by_graph
        with at.evaluation(x) as weights:
            rows = zip(x, y, w, v, strict=True)
            return torch.stack([product(at.sample_loss, weights, *r) for r in rows])

    reverse, forward = (
        (autodiff.pulled_by_reverse, autodiff.pulled)
        if back
        else (autodiff.pushed_by_reverse, autodiff.pushed)
    )
    return {
        "double backward, one by one": loop,
        "torch.func, reverse only": lambda: batched(reverse),
        "torch.func, with forward mode": lambda: batched(forward),
    }


def many(name: str, batch: int) -> dict[str, Callable[[], Tensor]]:
    """H v of each sample of a batch, as a solver asks for it again and again."""
    net, x, y = network(name, batch)
    at = GradientMap(net)
    jacobian = GradientJacobian(at, x, y)
    w, v = 1 / jacobian.scale.float(), torch.randn(batch, x[0].numel())
    jacobian.products.normal(v)
    return {
        "J v, then Jᵀu": lambda: at.vjp(x, y, at.jvp(x, y, v, w), w),
        "one graph": lambda: jacobian.products.normal(v),
    }


def columns(name: str, k: int) -> dict[str, Callable[[], Tensor]]:
    """J times k directions of one sample."""
    net, x, y = network(name, 1)
    at = GradientMap(net)
    v = torch.randn(k, x[0].numel())
    at.jvp(x, y, v[:1])
    return {
        "jvp": lambda: at.jvp(x.expand(k, *x.shape[1:]), y.expand(k), v),
        "dense": lambda: at.dense(x[0], y[0], v),
    }


@contextmanager
def without(*forms: str, known: bool = False) -> Iterator[None]:
    """H without some of its forms; with no known Δ unless ``known``."""
    choose = sources.choose

    def other(*arguments: object) -> str:
        form: str = choose(*arguments)
        return "plain" if form in forms else form

    few = sources._FEW if known else 10**9
    with (
        mock.patch.object(sources, "choose", other),
        mock.patch.object(sources, "_FEW", few),
    ):
        yield


def matrices(name: str, *ways: str) -> dict[str, Callable[[], Tensor]]:
    """H of one sample in some ways."""
    net, x, y = network(name, 1)
    at = GradientMap(net)
    at.jvp(x, y, torch.randn(1, x[0].numel()))
    space = grams.Workspace()

    def whole() -> Tensor:
        with mock.patch.object(grams, "_comes_apart", return_value=False):
            return grams.gram(at, x[0], y[0], workspace=space).h

    def by_layers(*left_out: str, known: bool = False) -> Tensor:
        with without(*left_out, known=known):
            h = grams.gram(at, x[0], y[0], workspace=space, max_memory=_MEMORY)
        return h.h

    offered: dict[str, Callable[[], Tensor]] = {
        "whole J": whole,
        "plain": lambda: by_layers("isometric", "factors"),
        "isometric": lambda: by_layers("factors"),
        "factors": lambda: by_layers("isometric"),
        "no known Δ": lambda: by_layers(),
        "known Δ, plain": lambda: by_layers("ranged", known=True),
        "known Δ, ranged": lambda: by_layers(known=True),
    }
    return {way: offered[way] for way in ways}


def attacks(
    name: str, count: int, *paths: PathName, stack: ExitStack
) -> dict[str, Callable[[], Tensor]]:
    """A step of attacks on gradients, cosine distance."""

    def by(path: PathName) -> Callable[[], Tensor]:
        net, x, y = network(name, count)
        shared = SharedGradient.of(GradientMap(net), x, y)
        start, targets = torch.rand(count, 1, *x.shape[1:]), torch.arange(count)
        problem = MatchingProblem(GradientMap(net), shared, "cosine", path=path)
        matcher = stack.enter_context(problem.opened())

        def step() -> Tensor:
            return matcher.evaluate(start, y[:, None], targets).gradient

        step()
        return step

    return {path: by(path) for path in paths}


def updates(
    name: str, clients: int, samples: int, stack: ExitStack
) -> dict[str, Callable[[], Tensor]]:
    """Eight steps of SME, one of them with α."""

    def by(path: UpdatePathName, match: bool) -> Callable[[], Tensor]:
        net, x, _ = network(name, clients * samples)
        w = nn.utils.parameters_to_vector(net.parameters()).detach()
        final = w + 0.01 * torch.randn(clients, len(w))
        labels = torch.randint(10, (clients, samples))
        update = WeightUpdate(w, final, labels, tuple(x.shape[1:]), samples)
        maps = GradientMap(net)
        objective = surrogate.SurrogateObjective(
            maps, update, labels, stack.enter_context(opened(maps, path)), Priors(),
            every=8,
        )  # fmt: skip
        x = torch.randn(clients, samples, *x.shape[1:])
        alpha, rows = torch.full((clients,), 0.5), torch.arange(clients)

        def steps() -> Tensor:
            found = [objective(x, alpha, rows, step) for step in range(8)]
            return found[-1].gradient

        with ExitStack() as only:
            if not match:  # the path itself is kept, which the first step finds
                never = mock.patch.object(surrogate, "LayerwisePath", type(None))
                only.enter_context(never)
            steps()
        return steps

    return {
        "plain": by("plain", False),
        "layers": by("layers", False),
        "match": by("layers", True),
    }


# What attacks are evaluated in, until the end.
OPEN = ExitStack()
KNOWN = ("no known Δ", "known Δ, plain", "known Δ, ranged")
TABLES: dict[str, Callable[[], dict[str, Callable[[], Tensor]]]] = {
    "J v, 16 × LeNet, sigmoid": lambda: single("LeNet, sigmoid", 16, False),
    "Jᵀu, 16 × LeNet, sigmoid": lambda: single("LeNet, sigmoid", 16, True),
    "H v, 16 × LeNet, sigmoid": lambda: many("LeNet, sigmoid", 16),
    "J v, 8 × MLP (1000, 1000), ReLU": lambda: single(
        "MLP (1000, 1000), ReLU", 8, False
    ),
    "Jᵀu, 8 × MLP (1000, 1000), ReLU": lambda: single(
        "MLP (1000, 1000), ReLU", 8, True
    ),
    "H v, 8 × MLP (1000, 1000), ReLU": lambda: many("MLP (1000, 1000), ReLU", 8),
    "J v, 8 × ResNet8, ReLU": lambda: single("ResNet8, ReLU", 8, False),
    "Jᵀu, 8 × ResNet8, ReLU": lambda: single("ResNet8, ReLU", 8, True),
    "H v, 8 × ResNet8, ReLU": lambda: many("ResNet8, ReLU", 8),
    "J v, 2 × a small ViT": lambda: single("a small ViT", 2, False),
    "Jᵀu, 2 × a small ViT": lambda: single("a small ViT", 2, True),
    "H v, 2 × a small ViT": lambda: many("a small ViT", 2),
    "J V, 64 directions, LeNet, sigmoid": lambda: columns("LeNet, sigmoid", 64),
    "J V, 32 directions, ResNet8, ReLU": lambda: columns("ResNet8, ReLU", 32),
    "H, LeNet, sigmoid": lambda: matrices(
        "LeNet, sigmoid", "whole J", "plain", "factors"
    ),
    "H, LeNet, sigmoid, 3×32×32": lambda: matrices(
        "LeNet, sigmoid, 3×32×32", "whole J", "plain", "factors"
    ),
    "H, ResNet8, GELU": lambda: matrices("ResNet8, GELU", "plain", "factors"),
    # Where nothing is known of Δ, as with GELU, which this network does not have.
    "H, ResNet18, 1×14×14": lambda: matrices(
        "ResNet18, ReLU, 1×14×14", "plain", "factors"
    ),
    "H, MLP (1000, 1000), sigmoid": lambda: matrices(
        "MLP (1000, 1000), sigmoid", "plain", "isometric"
    ),
    "H, ranged, LeNet, ReLU": lambda: matrices("LeNet, ReLU", *KNOWN),
    "H, ranged, MLP (1000, 1000), ReLU": lambda: matrices(
        "MLP (1000, 1000), ReLU", "no known Δ", "known Δ, ranged"
    ),
    "H, ranged, ResNet8, ReLU": lambda: matrices("ResNet8, ReLU", *KNOWN),
    "H, ranged, VGG9, ReLU": lambda: matrices(
        "VGG9, ReLU", "no known Δ", "known Δ, ranged"
    ),
    **{
        f"step, {count} attacks, {name}": partial(
            attacks, name, count, "loop", "vmap", "layerwise", stack=OPEN
        )
        for name in ("LeNet, ReLU", "MLP, 3×32×32", "ResNet8, ReLU", "VGG9, ReLU")
        for count in (1, 32)
    },
    "step, 8 attacks, a small ViT": partial(
        attacks, "a small ViT", 8, "loop", "vmap", stack=OPEN
    ),
    **{
        f"SME, {clients} × {samples}, {name}": partial(
            updates, name, clients, samples, OPEN
        )
        for name in ("SMELeNet", "MLP, 1×28×28", "MLP (1000, 1000), ReLU")
        for samples in (1, 10)
        for clients in (1, 8)
    },
}


def main() -> None:
    """Prints a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="tables whose name matches")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| | way | CPU s | faster than the way before | differs by |")
    print("|---|---|---|---|---|")
    for name, make in TABLES.items():
        if not re.search(arguments.only, name):
            continue
        ways = make()
        expected = None
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        apart = {}
        for _ in range(arguments.repeats):
            for way, run in ways.items():
                started = time.process_time()
                result = run().double().flatten()
                seconds[way].append(time.process_time() - started)
                expected = result if expected is None else expected
                apart[way] = float((result - expected).norm() / expected.norm())
        before = None
        for way, taken in seconds.items():
            now = statistics.median(taken)
            ratio = "" if before is None else f"{before / now:.2f}"
            print(f"| {name} | {way} | {now:.3g} | {ratio} | {apart[way]:.0e} |")
            before = now


if __name__ == "__main__":
    with OPEN:
        main()
