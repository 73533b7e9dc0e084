"""Seconds per sample for λ_1 and for the whole spectrum, against the papers' way.

    python benchmarks/spectrum.py [--threads 1] [--probes 32] [--repeats 3]

One run, one model (the LeNet of I²F on 28×28 inputs, uniform initialisation), the same
samples and dtype for all. The papers' procedure works on one sample at a time with 50
power iterations, each a product with J and one with Jᵀ: by autograd double backward,
both products functions of their own (``papers, double backward``, the base of the
ratios); the same tuned to share one graph over all iterations (``… one graph``); or
with J·v as a finite difference of gradients, as LAVP describes it. Ours: batched
Lanczos with the tolerance that the scores use, and the exact spectrum from one Gram
matrix per sample; the gradient map is made once, as the monitor does.

The rows interleave: each repeat runs every row once, and the median over repeats is
shown, so that a drift of the machine's speed hits all rows alike. Errors are relative
to a float64 dense computation.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from leakwatch.gradients import GradientMap
from leakwatch.jacobian import GradientJacobian
from leakwatch.models import LeNet, initialize
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


def main() -> None:
    """Runs and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--probes", type=int, default=32)
    parser.add_argument("--singles", type=int, default=16, help="samples of slow rows")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    net = LeNet()
    initialize(net, "uniform", seed=0)
    x, y = torch.rand(args.probes, 1, 28, 28), torch.arange(args.probes) % 10
    few = min(args.singles, args.probes)

    maps = {d: GradientMap(net, dtype=d) for d in (torch.float32, torch.float64)}

    def batched(dtype: torch.dtype, n: int) -> GradientJacobian:
        return GradientJacobian(maps[dtype], x[:n], y[:n])

    def ours_largest() -> list[float]:
        jacobian = batched(torch.float32, args.probes)
        found = lanczos(jacobian.normal(), k=1, tol=1e-4)
        return (found.eigenvalues[:, 0] * jacobian.scale**2).tolist()

    def ours_exact() -> list[float]:
        jacobian = batched(torch.float32, few)
        return [
            float(exact(jacobian.gram(i).h).eigenvalues[0, 0] * jacobian.scale[i] ** 2)
            for i in range(few)
        ]

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
        "leakwatch, lanczos (λ_1)": (ours_largest, args.probes),
        "leakwatch, exact (all 784)": (ours_exact, few),
    }
    reference = batched(torch.float64, few)
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
    largest = statistics.median(seconds["leakwatch, lanczos (λ_1)"])
    print(f"λ_1 is {base / largest:.0f} times faster per sample than the papers' way.")


if __name__ == "__main__":
    main()
