"""Seconds per sample for λ_1 and for the whole spectrum, against the papers' way.

    python benchmarks/spectrum.py [--threads 1] [--probes 32] [--repeats 3]

One run, one model (the LeNet of I²F on 28×28 inputs, uniform initialisation), the same
samples and dtype for all. The papers' procedure works on one sample at a time with 50
power iterations, each a product with J and one with Jᵀ: by autograd double backward,
both products functions of their own (``papers, double backward``, the base of the
ratios); the same tuned to share one graph over all iterations (``… one graph``); or
with J·v as a finite difference of gradients, as LAVP describes it. Ours: the
public call ``leakwatch.score(net, x, y, ["lavp_l2_max"], solver=...)``, all that it
does included, matrix-free (what ``"auto"`` takes for this score alone) and exact.

    python benchmarks/spectrum.py --calls [--repeats 5] [--exact-samples 8]

Another table: the public call on MNIST digits (in ``LEAKWATCH_TEST_DATA``, or loaded
into ``data``), for 1, 8 and 32 samples: λ_1 against (a) 50 power iterations by double
backward and (b) ARPACK's ``eigsh`` in the space of parameters, as I²F's code does it,
its products by double backward as well; and all exact scores against (a). CPU seconds.

    python benchmarks/spectrum.py --networks all [--max-memory 6144] [--repeats 1]

Another table: the whole H = JᵀJ of one sample on 3×32×32 inputs, by dense J and its
float64 inner products against layers taken apart, for the papers' networks. Each row is
a process of its own, so that its peak memory is its own. Seconds are of CPU time: on a
machine that others use, the wall clock measures them.

The rows of the first table interleave: each repeat runs every row once, and the median
over repeats is shown, so that a drift of the machine's speed hits all rows alike.
Errors are relative to a float64 dense computation.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor
from torchvision.datasets import MNIST
from torchvision.transforms.functional import to_tensor

from leakwatch import GradientJacobian, score
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.gram.gram import columns_stored, gram
from leakwatch.models import LeNet, build_model, initialize
from leakwatch.scores import Score, resolve
from leakwatch.spectrum import exact, lanczos

POWER_ITERATIONS = 50


def papers_double_backward(net: torch.nn.Module, x: Tensor, y: Tensor) -> float:
    """λ_1 of one sample; J·v and Jᵀ·u are functions of their own, as published."""
    weights = list(net.parameters())
    leaf = x[None].clone().requires_grad_()

    def gradient() -> tuple[Tensor, ...]:
        loss = torch.nn.functional.cross_entropy(net(leaf), y[None])
        return torch.autograd.grad(loss, weights, create_graph=True)

    def jvp(v: Tensor) -> tuple[Tensor, ...]:
        g = gradient()
        u = [torch.zeros_like(part, requires_grad=True) for part in g]
        pulled = torch.autograd.grad(g, leaf, u, create_graph=True)[0]
        return torch.autograd.grad(pulled, u, v)

    def vjp(u: tuple[Tensor, ...]) -> Tensor:
        return torch.autograd.grad(gradient(), leaf, u)[0]

    v = torch.randn_like(leaf)
    value = torch.zeros(())
    for _ in range(POWER_ITERATIONS):
        v = v / v.norm()
        hv = vjp(jvp(v))
        value, v = (v * hv).sum(), hv
    return float(value)


def papers_one_graph(net: torch.nn.Module, x: Tensor, y: Tensor) -> float:
    """The same with everything that does not depend on v differentiated only once."""
    weights = list(net.parameters())
    leaf = x[None].clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(net(leaf), y[None])
    g = torch.autograd.grad(loss, weights, create_graph=True)
    u = [torch.zeros_like(part, requires_grad=True) for part in g]
    pulled = torch.autograd.grad(g, leaf, u, create_graph=True)[0]
    v = torch.randn_like(leaf)
    value = torch.zeros(())
    for _ in range(POWER_ITERATIONS):
        v = v / v.norm()
        jv = torch.autograd.grad(pulled, u, v, retain_graph=True)
        hv = torch.autograd.grad(g, leaf, jv, retain_graph=True)[0]
        value, v = (v * hv).sum(), hv
    return float(value)


def papers_finite_difference(net: torch.nn.Module, x: Tensor, y: Tensor) -> float:
    """λ_1 of one sample: J·v as a difference quotient of two gradients."""
    weights = list(net.parameters())
    step = 1e-3

    def gradient(at: Tensor, graph: bool) -> tuple[Tensor, ...]:
        loss = torch.nn.functional.cross_entropy(net(at), y[None])
        return torch.autograd.grad(loss, weights, create_graph=graph)

    leaf = x[None].clone().requires_grad_()
    here = gradient(leaf, graph=True)
    v = torch.randn_like(leaf)
    value = torch.zeros(())
    for _ in range(POWER_ITERATIONS):
        v = v / v.norm()
        moved = gradient(leaf.detach() + step * v, graph=False)
        jv = [(a - b.detach()) / step for a, b in zip(moved, here, strict=True)]
        hv = torch.autograd.grad(here, leaf, jv, retain_graph=True)[0]
        value, v = (v * hv).sum(), hv
    return float(value)


def arpack(net: torch.nn.Module, x: Tensor, y: Tensor) -> float:
    """λ_1 of one sample by ARPACK on J Jᵀ; products are functions of their own."""
    weights = list(net.parameters())
    shapes = [p.shape for p in weights]
    leaf = x[None].clone().requires_grad_()

    def gradient() -> tuple[Tensor, ...]:
        loss = torch.nn.functional.cross_entropy(net(leaf), y[None])
        return torch.autograd.grad(loss, weights, create_graph=True)

    def product(u: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        flat = torch.from_numpy(np.asarray(u, dtype=np.float32).reshape(-1))
        parts = torch.split(flat, [shape.numel() for shape in shapes])
        given = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        v = torch.autograd.grad(gradient(), leaf, given)[0]
        g = gradient()
        towards = [torch.zeros_like(part, requires_grad=True) for part in g]
        pulled = torch.autograd.grad(g, leaf, towards, create_graph=True)[0]
        jv = torch.autograd.grad(pulled, towards, v)
        return torch.cat([part.reshape(-1) for part in jv]).numpy()

    size = sum(shape.numel() for shape in shapes)
    operator = LinearOperator((size, size), matvec=product, dtype=np.float32)
    return float(eigsh(operator, k=1, return_eigenvectors=False)[0])


def digits(n: int) -> tuple[Tensor, Tensor]:
    """The first test digits."""
    root = os.environ.get("LEAKWATCH_TEST_DATA", "data")
    data = MNIST(root, train=False, download="LEAKWATCH_TEST_DATA" not in os.environ)
    x = torch.stack([to_tensor(data[i][0]) for i in range(n)])
    return x, torch.tensor([data[i][1] for i in range(n)])


def calls(repeats: int, exact_samples: int) -> None:
    """Prints the table of the public call on digits."""
    x, y = digits(32)
    every = resolve(["lavp", "i2f", "bayes", "norms", "range"])
    plain = [s for s in every if "range" not in s.needs]
    nets: dict[str, torch.nn.Module] = {}
    for name in ("sigmoid", "relu"):
        nets[name] = LeNet(activation=name)
        initialize(nets[name], "uniform", seed=0)

    def exact_scores(name: str, scores: Sequence[Score]) -> Callable[[], object]:
        few = slice(exact_samples)
        return lambda: score(nets[name], x[few], y[few], scores, noise_std=1e-2)

    def largest(n: int) -> Callable[[], object]:
        return lambda: score(nets["sigmoid"], x[:n], y[:n], ["lavp_l2_max"])

    rows: dict[str, tuple[Callable[[], object], int, str]] = {}
    for name in nets:
        net = nets[name]
        rows[f"(a) {name}"] = (
            lambda net=net: papers_double_backward(net, x[0], y[0]),  # type: ignore[misc]
            1,
            name,
        )
    rows["(b) sigmoid"] = lambda: arpack(nets["sigmoid"], x[0], y[0]), 1, "sigmoid"
    for n in (1, 8, 32):
        rows[f"λ_1 of {n}"] = largest(n), n, "sigmoid"
    for name in nets:
        rows[f"exact, {name}"] = exact_scores(name, plain), exact_samples, name
        wider = exact_scores(name, every)
        rows[f"exact with range, {name}"] = wider, exact_samples, name
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for repeat in range(repeats + 1):
        for name, (run, samples, _) in rows.items():
            start = time.process_time()
            run()
            if repeat:  # the first round warms up, and examines the networks
                seconds[name].append((time.process_time() - start) / samples)
    middle = {name: statistics.median(found) for name, found in seconds.items()}
    print(
        f"LeNet (I²F) on digits, float32, {torch.get_num_threads()} thread(s), torch "
        f"{torch.__version__}, CPU s per sample, median of {repeats}"
    )
    print(
        f"{'':28}{'s/sample':>10}{'min–max':>17}{'of (a)':>8}{'(a) ÷':>8}{'(b) ÷':>8}"
    )
    for name, found in seconds.items():
        base = middle[f"(a) {rows[name][2]}"]
        spread = f"{min(found):.4f}–{max(found):.4f}"
        print(
            f"{name:28}{middle[name]:10.4f}{spread:>17}{middle[name] / base:8.3f}"
            f"{base / middle[name]:8.1f}{middle['(b) sigmoid'] / middle[name]:8.1f}"
        )


# -- networks on 3×32×32 inputs ------------------------------------------------------

NETWORKS: dict[str, dict[str, object]] = {
    "mlp": {"hidden_sizes": (1000, 1000)},
    "lenet": {},
    "vgg9": {},
    "resnet8": {},
    "resnet18": {},
}
# Directions of which dense J is timed where all of them don't fit.
SUBSET = {"mlp": 64, "vgg9": 32, "resnet18": 8}
# Columns of J whose float64 inner products are timed, for the same reason.
COLUMNS = 2048


def one_row(name: str, method: str, max_memory: float | None) -> dict[str, float]:
    """CPU seconds and peak memory of H of one sample, in a process of its own."""
    torch.manual_seed(0)
    net = build_model(
        name, in_channels=3, num_classes=10, image_size=32, model_args=NETWORKS[name]
    )
    x, y = torch.rand(3, 32, 32), torch.tensor(3)
    gradients = GradientMap(net)
    gradients(x[None], y[None])  # examines the network, once for all samples
    n, size = x.numel(), gradients.size
    row = {"numbers": float(size), "before": peak_mib(), "all": 1.0}
    start, wall = time.process_time(), time.perf_counter()
    if method == "layers":
        h = gram(gradients, x, y, max_memory=max_memory).h
        row["numbers"] = float(columns_stored(gradients, x, y))
    elif name not in SUBSET:
        j = gradients.dense(x, y, torch.eye(n))
        h = torch.zeros(n, n, dtype=torch.float64)
        for block in j.split(COLUMNS, 1):
            wide = block.double()
            h += wide @ wide.T
    else:
        few = SUBSET[name]
        gradients.dense(x, y, torch.eye(n)[:few])
        tangents = (time.process_time() - start) * n / few
        wide = torch.rand(n, COLUMNS, dtype=torch.float64)
        h = torch.zeros(n, n, dtype=torch.float64)
        start = time.process_time()
        h += wide @ wide.T
        products = (time.process_time() - start) * size / COLUMNS
        row |= {"all": 0.0, "cpu": tangents + products, "wall": math.nan}
        row["peak"] = n * size * gradients.dtype.itemsize / 2**20
    if row["all"]:
        row["cpu"] = time.process_time() - start
        row["wall"] = time.perf_counter() - wall
        row["peak"] = peak_mib()
        row["lambda_max"] = float(lanczos(h, tol=1e-10).eigenvalues[0, 0])
    return row


def peak_mib() -> float:
    """The most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def networks(names: list[str], threads: int, repeats: int, max_memory: float) -> None:
    """Prints the table of dense J against layers taken apart."""
    print(
        f"H = JᵀJ of one sample, 3×32×32, float32 tangents, {threads} thread(s), torch "
        f"{torch.__version__}, median of {repeats}; CPU seconds"
    )
    print(
        f"{'':10}{'':8}{'numbers':>12}{'CPU s':>10}{'wall s':>10}{'peak MiB':>10}"
        f"{'faster':>8}{'smaller':>8}  λ₁"
    )
    for name in names:
        rows: dict[str, list[dict[str, float]]] = {"dense": [], "layers": []}
        for _ in range(repeats):
            for method, found in rows.items():
                found.append(_in_process(name, method, threads, max_memory))
        base = _median(rows["dense"])
        for method, found in rows.items():
            row = _median(found)
            about = "~" if not row["all"] else ""
            print(
                f"{name:10}{method:8}{row['numbers']:12,.0f}"
                f"{about + format(row['cpu'], '.1f'):>10}{row['wall']:10.1f}"
                f"{about + format(row['peak'], '.0f'):>10}"
                f"{base['cpu'] / row['cpu']:8.1f}{base['peak'] / row['peak']:8.1f}"
                f"  {row.get('lambda_max', math.nan):.8g}",
                flush=True,
            )
    print(
        "~: J does not fit; tangents of a few directions and the inner products of "
        f"{COLUMNS} columns were timed and scaled, the memory is that of J alone."
    )


def _in_process(
    name: str, method: str, threads: int, max_memory: float
) -> dict[str, float]:
    command = [sys.executable, __file__, "--row", name, method]
    command += ["--threads", str(threads), "--max-memory", str(max_memory)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return row


def _median(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def main() -> None:
    """Runs and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--probes", type=int, default=32)
    parser.add_argument("--singles", type=int, default=16, help="samples of slow rows")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--networks", nargs="*", choices=[*NETWORKS, "all"])
    parser.add_argument("--max-memory", type=float, default=6144, help="MiB")
    parser.add_argument("--calls", action="store_true", help="the call, on digits")
    parser.add_argument("--exact-samples", type=int, default=8)
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.row:
        print(json.dumps(one_row(*args.row, args.max_memory)))
        return
    if args.calls:
        calls(args.repeats, args.exact_samples)
        return
    if args.networks is not None:
        every = not args.networks or "all" in args.networks
        names = list(NETWORKS) if every else args.networks
        networks(names, args.threads, args.repeats, args.max_memory)
        return
    torch.manual_seed(0)

    net = LeNet()
    initialize(net, "uniform", seed=0)
    x, y = torch.rand(args.probes, 1, 28, 28), torch.arange(args.probes) % 10
    few = min(args.singles, args.probes)

    def ours(solver: str, n: int) -> list[float]:
        found = score(net, x[:n], y[:n], ["lavp_l2_max"], solver=solver)
        return found["lavp_l2_max"].tolist()

    rows: dict[str, tuple[Callable[[], list[float]], int]] = {
        "papers, double backward": (
            lambda: [papers_double_backward(net, x[i], y[i]) for i in range(few)],
            few,
        ),
        "papers, … one graph": (
            lambda: [papers_one_graph(net, x[i], y[i]) for i in range(few)],
            few,
        ),
        "papers, finite difference": (
            lambda: [papers_finite_difference(net, x[i], y[i]) for i in range(few)],
            few,
        ),
        "leakwatch.score, lanczos": (lambda: ours("lanczos", args.probes), args.probes),
        "leakwatch.score, exact": (lambda: ours("exact", few), few),
    }
    reference = GradientJacobian(
        GradientMap(net, dtype=torch.float64), x[:few], y[:few]
    )
    truth = [
        float(exact(reference.gram(i).h).eigenvalues[0, 0] * reference.scale[i] ** 2)
        for i in range(few)
    ]
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    errors: dict[str, float] = {}
    for repeat in range(args.repeats + 1):
        for name, (run, samples) in rows.items():
            start = time.perf_counter()
            values = run()
            if repeat:  # the first round warms up
                seconds[name].append((time.perf_counter() - start) / samples)
            errors[name] = max(
                abs(v / t - 1) for v, t in zip(values[:few], truth, strict=True)
            )
    base = statistics.median(seconds["papers, double backward"])
    print(
        f"LeNet (I²F), 1×28×28, float32, {args.threads} thread(s), torch "
        f"{torch.__version__}, median of {args.repeats}"
    )
    print(f"{'':30}{'s/sample':>10}{'min–max':>17}{'ratio':>8}{'error of λ_1':>14}")
    for name, found in seconds.items():
        middle = statistics.median(found)
        spread = f"{min(found):.4f}–{max(found):.4f}"
        print(
            f"{name:30}{middle:10.4f}{spread:>17}{middle / base:8.3f}"
            f"{errors[name]:14.1e}"
        )
    largest = statistics.median(seconds["leakwatch.score, lanczos"])
    print(
        f"score(..., solver='lanczos') finds λ_1 {base / largest:.1f} times faster per "
        f"sample than the papers' way."
    )


if __name__ == "__main__":
    main()
