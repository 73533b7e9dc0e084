"""Attack-iterations per second, against one attack at a time as published.

    OMP_NUM_THREADS=1 python benchmarks/attacks.py [--attacks 32] [--repeats 5]

One run, one thread, the same models, samples, starts and dtype for all rows: cosine
distance, total variation, Adam with lr 0.1. ``published loop`` is one attack at a time:
a forward, ``torch.autograd.grad`` with ``create_graph``, the distance and the variation
by autograd, ``backward``, ``torch.optim.Adam``. Ours is ``FirstOrder.run`` with all
attacks at once, everything included (priors, best so far, finite checks) except the
choice of a path, which is made once per network and shown.

The rows interleave: each repeat runs both, and medians over repeats are shown, so that
a drift of the machine's speed hits both alike. Quality: both run the same number of
steps from the same starts; shown are the median PSNR of each and the largest relative
difference of the final distance.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time

import torch
from torch import Tensor, nn

from leakwatch.attacks import FirstOrder, PixelScale, SharedGradient, Start
from leakwatch.attacks.matching.objective import MatchingProblem
from leakwatch.attacks.matching.priors import Priors
from leakwatch.derivatives import GradientMap
from leakwatch.models import LeNet, ResNet8, initialize

TV = 1e-4


def published(
    net: nn.Module, target: list[Tensor], y: Tensor, start: Tensor, steps: int
) -> tuple[Tensor, float]:
    """One attack as in the authors' codes; image with the lowest loss, its distance."""
    weights = list(net.parameters())
    x = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.1)
    marks = [-(-steps * k // 8) for k in (3, 5, 7)]
    decay = torch.optim.lr_scheduler.MultiStepLR(optimizer, marks, 0.1)
    best, image, distance = float("inf"), start, 1.0
    for step in range(steps + 1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        g = torch.autograd.grad(loss, weights, create_graph=True)
        dot = sum((a * b).sum() for a, b in zip(g, target, strict=True))
        squares = sum(a.square().sum() for a in g)
        others = sum(b.square().sum() for b in target)
        cosine = 1 - dot / (squares.sqrt() * others.sqrt())
        tv = x.diff(dim=-1).abs().mean() + x.diff(dim=-2).abs().mean()
        total = cosine + TV * tv
        if total.item() < best:
            best, image = total.item(), x.detach().clone()
            distance = cosine.item()
        if step == steps:
            break
        total.backward()
        optimizer.step()
        decay.step()
        with torch.no_grad():
            x.clamp_(0, 1)
    return image, distance


def psnr(found: Tensor, truth: Tensor) -> float:
    """Median PSNR in dB."""
    errors = (found - truth).flatten(1).square().mean(1)
    return float((-10 * errors.log10()).median())


def compare(
    name: str, net: nn.Module, args: argparse.Namespace, timed: int, steps: int
) -> None:
    """Measures one network and prints its rows."""
    net.eval()
    generator = torch.Generator().manual_seed(0)
    n = args.attacks
    # Smooth images, so that total variation does not decide.
    coarse = torch.rand(n, 3, 8, 8, generator=generator)
    x = nn.functional.interpolate(coarse, size=32, mode="bilinear")
    y = torch.arange(n) % 10
    gradients = GradientMap(net)
    shared = SharedGradient.of(gradients, x, y)
    start = Start.uniform().draw(targets=n, images=1, shape=(3, 32, 32), restarts=1)
    sizes = [p.numel() for p in net.parameters()]
    targets = [
        [
            part.view(p.shape)
            for part, p in zip(
                torch.split(shared.gradient[i], sizes), net.parameters(), strict=True
            )
        ]
        for i in range(n)
    ]

    def ours(steps: int, n: int = n) -> tuple[Tensor, Tensor]:
        attack = FirstOrder(steps=steps, priors=Priors(tv=TV), tolerance=0.0)
        found = attack.run(
            gradients,
            shared.select(slice(0, n)),
            pixels=PixelScale(),
            start=Start.uniform(),
            initial=start[:, :n],
        )
        return found.images, found.loss

    problem = MatchingProblem(gradients, shared, "cosine")
    with problem.opened() as matcher:
        matcher.evaluate(start[0], y[:, None], torch.arange(n))
        path = matcher.path

    rates: dict[str, list[float]] = {"published loop": [], "leakwatch": []}
    for repeat in range(args.repeats + 1):
        began = time.perf_counter()
        published(net, targets[0], y[:1], start[0, 0], timed)
        middle = time.perf_counter()
        ours(timed)
        ended = time.perf_counter()
        if repeat:  # the first round warms up
            rates["published loop"].append((timed + 1) / (middle - began))
            rates["leakwatch"].append(n * (timed + 1) / (ended - middle))
    ratios = [
        a / b for a, b in zip(rates["leakwatch"], rates["published loop"], strict=True)
    ]
    print(f"{name}, 3×32×32, {sum(sizes)} parameters, {n} attacks, path: {path}")
    for row, found in rates.items():
        spread = f"{min(found):.0f}–{max(found):.0f}"
        print(f"  {row:16}{statistics.median(found):9.0f} its/s  {spread:>12}")
    print(
        f"  ratio           {statistics.median(ratios):9.1f}        "
        f"{min(ratios):.1f}–{max(ratios):.1f}"
    )
    few = args.compared
    single = [
        published(net, targets[i], y[i : i + 1], start[0, i], steps) for i in range(few)
    ]
    images, losses = ours(steps, few)
    theirs = torch.cat([image for image, _ in single])
    apart = max(
        abs(float(a) / max(b, 1e-12) - 1)
        for a, (_, b) in zip(losses, single, strict=True)
    )
    print(
        f"  after {steps} steps  PSNR {psnr(theirs, x[:few]):.2f} dB (loop), "
        f"{psnr(images, x[:few]):.2f} dB (leakwatch); distances differ by at most "
        f"{100 * apart:.1f} %\n"
    )


def main() -> None:
    """Runs and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--attacks", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=200, help="of LeNet in each repeat"
    )
    parser.add_argument("--compared", type=int, default=4, help="attacks for quality")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.disable(logging.WARNING)
    print(f"float32, {args.threads} thread(s), torch {torch.__version__}\n")
    torch.manual_seed(0)
    lenet = initialize(LeNet(in_channels=3, image_size=32), "uniform", seed=0)
    compare("LeNet (I²F)", lenet, args, args.steps, steps=200)
    resnet = ResNet8(in_channels=3, image_size=32)
    compare("ResNet8", resnet, args, max(1, args.steps // 3), steps=60)


if __name__ == "__main__":
    main()
