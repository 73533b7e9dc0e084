"""What defenses cost in accuracy and buy against attacks, at equal ‖δ‖/‖g‖.

    LEAKWATCH_TEST_DATA=data OMP_NUM_THREADS=1 python benchmarks/trade_off.py
        [--data MNIST] [--defenses gaussian ...] [--budgets 0.1 1 10] [--samples 3]

A network is trained without a defense, on images pooled to 14×14 (MNIST, LeNet with
sigmoids) or 8×8 (CIFAR-10, ResNet8 with sigmoids), and then for some steps of SGD under
each defense and budget, every time from the same weights with the same batches. Then
test images, which none of them has seen, are shared under the same defense and attacked
by Gauss–Newton. ``leakwatch.trade_off`` does it all; ``--out`` keeps its files. No
experiment of ``leakwatch reproduce`` asks this: no paper has such tables.

``--epochs 0 --train-steps 1 --lr 0`` attacks the untrained network; ``--no-box`` leaves
the attackers without the range of pixels. ``--curvature`` attacks nothing: it says how
far the gradient moves, to first order and beyond, when the first test image moves along
all directions that ``waterfill`` hides. ``--moved`` attacks nothing either: it says how
much of the images ``input_space`` hides at each budget from who inverts the gradient
exactly, beside images that are moved less in the same directions instead of as far in
fewer; ``--out`` shows what is left, a row for each budget below the originals.

The data are found through ``LEAKWATCH_TEST_DATA``: a folder with ``MNIST/raw``, and
``cifar10.npz`` with train_images, train_labels, test_images and test_labels.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from pathlib import Path

import lightning as L
import numpy as np
import torch
from networks import pixels
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.utils import save_image

from leakwatch import trade_off
from leakwatch.attacks import GaussNewton
from leakwatch.cli.trade_training import LightningTraining, accuracy_on
from leakwatch.defenses import (
    Budget,
    EigenNoise,
    InputSpace,
    InRange,
    Samples,
    Waterfill,
    observed,
    registered_defenses,
)
from leakwatch.defenses.eigen.input_space import Moves
from leakwatch.derivatives import GradientMap
from leakwatch.models import LitClassifier, initialize
from leakwatch.spectrum.operators import random_vector

# (network, its arguments, initialisation, images to begin with, epochs, lr of these)
RECIPES = {
    "MNIST": ("lenet", {"activation": "sigmoid"}, "uniform", 12_000, 4, 5e-3),
    "CIFAR10": ("resnet8", {"activation": "sigmoid"}, "default", 10_000, 4, 5e-3),
}
SIZE = {"MNIST": 14, "CIFAR10": 8}


def images(name: str, *, train: bool) -> tuple[Tensor, Tensor]:
    """Pooled images in [0, 1], and labels."""
    if name == "MNIST":
        return pixels(name, train=train, size=SIZE[name])
    root = os.environ.get("LEAKWATCH_TEST_DATA", ".")
    with np.load(Path(root) / "cifar10.npz") as data:
        part = "train" if train else "test"
        x = torch.from_numpy(data[f"{part}_images"]).permute(0, 3, 1, 2).float() / 255
        y = torch.from_numpy(data[f"{part}_labels"]).long()
    return nn.functional.avg_pool2d(x, x.shape[-1] // SIZE[name]), y


class Images(L.LightningDataModule):
    """Normalised images: shuffled batches for training, all others for accuracy."""

    def __init__(self, name: str, most: int, batch: int, test: int) -> None:
        super().__init__()
        x, y = images(name, train=True)
        self.x, self.y = x[:most], y[:most]
        self.mean, self.std = float(self.x.mean()), float(self.x.std())
        u, v = images(name, train=False)
        self.u, self.v = u[:test], v[:test]
        self.batch = batch
        self.prior_std = float(self.x.var(0).mean().sqrt())

    def scaled(self, x: Tensor) -> Tensor:
        """Network inputs."""
        return (x - self.mean) / self.std

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Batches in a random order."""
        data = TensorDataset(self.scaled(self.x), self.y)
        return DataLoader(data, self.batch, shuffle=True)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Batches in order."""
        return DataLoader(TensorDataset(self.scaled(self.u), self.v), 500)


def begun(name: str, data: Images, epochs: int | None = None) -> LitClassifier:
    """A network that was trained without a defense."""
    model, args, scheme, most, usual, lr = RECIPES[name]
    torch.manual_seed(0)
    lit = LitClassifier(
        model,
        args,
        in_channels=data.x.shape[1],
        image_size=SIZE[name],
        optimizer="sgd",
        momentum=0.0,
    )
    net = lit.model
    initialize(net, scheme, seed=0)
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    x, y = data.scaled(data.x[:most]), data.y[:most]
    for _ in range(usual if epochs is None else epochs):
        for part in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[part]), y[part]).backward()
            optimizer.step()
    return lit


def curvature(lit: LitClassifier, data: Images, x: Tensor, y: Tensor, b: float) -> None:
    """Prints what noise along the v_i leaves clean: all but the first order."""
    at = Samples(GradientMap(lit, dtype=torch.float64), data.scaled(x).double(), y)
    r, lam = data.prior_std / data.std, at.basis.visible[0]
    made = EigenNoise(Budget(b), Waterfill(r)).protect(
        at.gradient, generator=torch.Generator().manual_seed(0), samples=at
    )
    covariance = made.knowledge.covariance
    assert covariance is not None
    hidden = covariance.along(at.basis)[0] >= lam * r**2 * (1 - 1e-9)
    seen = observed(at.gradients, made)
    xi = random_vector(len(lam), torch.Generator().manual_seed(1)) * hidden
    first = seen.gradients(at.x, y)
    print(
        f"{int(hidden.sum())} of {len(lam)} directions hidden, |g| "
        f"{float(at.gradient.norm()):.3g}; an image that is moved by R times this:"
    )
    print("  times  |J a|  beyond  whitened: |L J a|  beyond  noise left")
    for times in (1.0, 0.3, 0.1):
        a = times * r * (at.basis.directions[0] @ xi)
        there = at.x + a.view(at.x.shape)
        linear = at.gradients.jvp(at.x, y, a[None])
        beyond = at.gradients(there, y) - at.gradient - linear
        linear_seen = seen.gradients.jvp(at.x, y, a[None])
        beyond_seen = seen.gradients(there, y) - first - linear_seen
        sizes = (linear, beyond, linear_seen, beyond_seen, first - seen.message)
        print(f"  {times:5g}", *(f"{float(v.norm()):.2g}" for v in sizes), sep="  ")


def moved(at: Samples, data: Images, box: float, b: float) -> Tensor:
    """Prints how far images may move at a real ‖δ‖ of b ‖g‖, in two ways.

    What the first leaves to who inverts it and knows the prior comes back, as pixels.
    """
    total = (b * at.gradient.norm(dim=1)).square()
    r, prior = box / data.std, data.prior_std / data.std
    space = InputSpace(r)
    mean = data.scaled(data.x.mean(0)).double().flatten()
    asked = space.covariance(at, total)
    xi = asked.standard(torch.Generator().manual_seed(0))

    def fewer(t: Tensor) -> InRange:
        return space.covariance(at, t)

    def less(t: Tensor) -> InRange:
        scale = (t / total)[:, None]
        return InRange(at, asked.variance * scale, exact=True)

    linear = asked.changed(xi).norm(dim=1) / at.gradient.norm(dim=1)
    nothing = -10 * ((at.x.flatten(1) - mean) * data.std).square().mean(1).log10()
    print(
        f"{b:g} asked; without a search {_range(linear, '.3g')}; the mean image alone "
        f"{_range(nothing, '.1f')} dB"
    )
    for name, spread in (("all of them less", less), ("fewer directions", fewer)):
        moves = Moves(spread, xi)
        found = spread(moves.alone(total))
        size = found.changed(xi).norm(dim=1) / at.gradient.norm(dim=1)
        a = found.image(xi)
        plain = -10 * (a * data.std).square().mean(1).log10()
        # Knows by how much each u_i was moved, and the prior of the attacks.
        u, lam = at.basis.directions, at.basis.visible
        variance = found.variance / torch.where(lam > 0, lam, 1.0)
        off = torch.einsum("nij,ni->nj", u, at.x.flatten(1) + a - mean)
        kept = torch.einsum("nij,nj->ni", u, off * prior**2 / (prior**2 + variance))
        error = (kept + mean - at.x.flatten(1)) * data.std
        shrunk = -10 * error.square().mean(1).log10()
        hidden = (variance >= r**2 * (1 - 1e-9)).sum(1).double()
        print(
            f"  {name}: |delta|/|g| {_range(size, '.3g')}; hidden "
            f"{_range(hidden, '.0f')}; exact inversion {_range(plain, '.1f')} dB, "
            f"and with the prior {_range(shrunk, '.1f')} dB",
            flush=True,
        )
    left: Tensor = ((kept + mean) * data.std + data.mean).view_as(at.x)
    return left


def _range(values: Tensor, form: str) -> str:
    low, mid, high = (float(f(values)) for f in (torch.min, torch.median, torch.max))
    return f"{mid:{form}} ({low:{form}} to {high:{form}})"


def main() -> None:
    """Measures, prints the table, keeps the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="MNIST", choices=RECIPES)
    parser.add_argument(
        "--defenses",
        nargs="+",
        default=list(registered_defenses()[:2]),
        choices=registered_defenses(),
    )
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.1, 1, 10])
    parser.add_argument("--attackers", nargs="+", default=["naive", "adaptive"])
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--train-steps", type=int, default=25)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, help="before any defense")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--no-box", action="store_true")
    parser.add_argument("--curvature", action="store_true")
    parser.add_argument("--moved", action="store_true")
    parser.add_argument("--box", type=float, help="R, pixels; as the prior has it")
    parser.add_argument("--start", default="near")
    parser.add_argument("--directions", type=int, default=50)
    parser.add_argument("--test", type=int, default=2000)
    parser.add_argument("--size", type=int, help="pixels to a side")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    SIZE[args.data] = args.size or SIZE[args.data]
    warnings.filterwarnings("ignore", module="lightning")
    data = Images(args.data, 12_000, args.batch, args.test)
    lit = begun(args.data, data, args.epochs)
    lit.lr = args.lr
    accuracy = accuracy_on(data, "test")
    print(
        f"{args.data}, torch {torch.__version__}: begins at {accuracy(lit):.4f}",
        flush=True,
    )
    training = {"max_steps": args.train_steps, "max_epochs": -1, "accelerator": "cpu"}
    # After the images that accuracy is measured on: one of each class.
    u, v = images(args.data, train=False)
    u, v = u[args.test :], v[args.test :]
    chosen = [int((v == c).nonzero()[0]) for c in range(args.samples)]
    if args.curvature:
        curvature(lit, data, u[chosen[:1]], v[chosen[:1]], args.budgets[0])
        return
    if args.moved:
        x = data.scaled(u[chosen]).double()
        at = Samples(GradientMap(lit, dtype=torch.float64), x, v[chosen])
        left = [moved(at, data, args.box or data.prior_std, b) for b in args.budgets]
        if args.out:
            shown = torch.cat([u[chosen].double(), *left]).clamp(0, 1)
            large = nn.functional.interpolate(shown, scale_factor=4)
            save_image(large, args.out, nrow=len(chosen))
        return
    began = time.process_time()
    found = trade_off(
        lit,
        data.scaled(u[chosen]),
        v[chosen],
        LightningTraining(training, data),
        accuracy,
        defenses=args.defenses,
        budgets=args.budgets,
        attack=GaussNewton(patience=8, box=not args.no_box),
        steps=args.steps,
        attackers=args.attackers,
        start=args.start,
        radius=0.1 / data.std,
        directions=args.directions,
        box=args.box,
        mean=[data.mean] * u.shape[1],
        std=[data.std] * u.shape[1],
        prior_std=data.prior_std,
        prior_mean=data.x.mean(0),
        progress=lambda line: print(
            f"{line}  ({time.process_time() - began:.0f} CPU s)", flush=True
        ),
    )
    print(found.table())
    if args.out:
        found.save(args.out)


if __name__ == "__main__":
    main()
