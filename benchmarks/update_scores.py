"""Do scores of weight updates foresee what SME rebuilds from them?

    LEAKWATCH_TEST_DATA=data OMP_NUM_THREADS=1 python benchmarks/update_scores.py

Clients train for E epochs on N MNIST test digits each, from one network: untrained, or
after some rounds of a small federation on training digits.
Every sample is scored at its client's surrogate (``leakwatch.score_update``), then all
clients are attacked by SME, from a random start or beside the samples. Prints
Spearman's correlation, with 95 % bootstrap intervals, of each score with the PSNR of
each sample after optimal assignment, over all samples of all clients, and the predicted
beside the achieved median PSNR. Image contrast and total variation stand beside the
scores: what a score has to beat. No experiment of ``leakwatch reproduce`` asks this;
``leakwatch:update_audit/sme`` logs the same correlations of the clients of a training.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from networks import load, pixels
from torch import Tensor, nn

import leakwatch
from leakwatch.attacks import PixelScale, Start, SurrogateAttack
from leakwatch.derivatives import GradientMap
from leakwatch.federated import (
    FederatedAveraging,
    LocalTraining,
    client_updates,
    dirichlet_split,
    train_client,
)
from leakwatch.models import build_model
from leakwatch.quality import align, quality
from leakwatch.reporting.statistics.correlation import spearman

SCORES = (
    "grad_norm",
    "loss",
    "lavp_l2_max",
    "lavp_l2_min",
    "lavp_cos_max",
    "lavp_cos_min",
    "lavp_fusion",
    "i2f",
    "i2f_lb",
    "i2f_bayes",
)
PREDICTED = ("i2f_psnr", "i2f_bayes_psnr", "joint_i2f_bayes_psnr")


@dataclass(frozen=True)
class Setting:
    """One network and one kind of local training."""

    network: str
    size: int
    epochs: int
    samples: int
    lr: float
    batch: int = 5
    rounds: int = 0

    def __str__(self) -> str:
        return (
            f"{self.network}, {self.size}×{self.size} pixels, E = {self.epochs}, "
            f"N = {self.samples}, B = {self.batch}, learning rate {self.lr:g}, after "
            f"{self.rounds} rounds"
        )


SETTINGS = (
    Setting("femnist_cnn", 14, 10, 5, 0.004),
    Setting("femnist_cnn", 14, 50, 5, 0.004),
    Setting("sme_lenet", 14, 10, 5, 0.4),
    Setting("sme_lenet", 14, 10, 5, 0.4, rounds=20),
    Setting("femnist_cnn", 14, 10, 10, 0.004),
    Setting("femnist_cnn", 28, 10, 5, 0.004),
    Setting("femnist_cnn", 14, 10, 5, 0.05, rounds=20),
)


def digits(*, train: bool, size: int) -> tuple[Tensor, Tensor]:
    """MNIST, normalised."""
    x, y = pixels("MNIST", train=train, size=size)
    return (x - 0.1307) / 0.3081, y


def federation(setting: Setting, seed: int = 0) -> FederatedAveraging:
    """40 clients with 100 digits on average, a tenth of which answers."""
    x, y = (v[:4000] for v in digits(train=True, size=setting.size))
    parts = dirichlet_split(y, 40, alpha=0.5, least=10, seed=seed)
    torch.manual_seed(seed)
    net = build_model(
        setting.network, in_channels=1, num_classes=10, image_size=setting.size
    )
    return FederatedAveraging(
        net,
        [(x[part], y[part]) for part in parts],
        LocalTraining(epochs=10, batch_size=50, lr=setting.lr),
        share=0.1,
        answering="chance",
        seed=seed,
    )


def accuracy(net: nn.Module, size: int, images: int = 2000) -> float:
    """Share of the first test digits that a network classifies correctly."""
    x, y = digits(train=False, size=size)
    with torch.no_grad():
        right = net(x[:images]).argmax(1) == y[:images]
    return float(right.double().mean())


def baselines(x: Tensor, mean: float, std: float) -> dict[str, np.ndarray]:
    """What is known without any Jacobian: contrast and total variation."""
    image = x.double() * std + mean
    tv = image.diff(dim=-1).abs().flatten(1).mean(1)
    tv = tv + image.diff(dim=-2).abs().flatten(1).mean(1)
    return {"image_std": image.flatten(1).std(1).numpy(), "image_tv": tv.numpy()}


def measure(
    setting: Setting, clients: int, steps: int, products: int, near: float | None
) -> None:
    """Scores and attacks all clients of one setting and prints the table."""
    data = load("MNIST", clients * setting.samples, setting.size)
    # Classes follow each other in what load() gives: clients get all of them.
    order = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0))
    x = data.x[order].view(clients, setting.samples, *data.x.shape[1:])
    y = data.y[order].view(clients, -1)
    server = federation(setting)
    list(server.run(setting.rounds))
    net = server.module
    how = leakwatch.LocalTraining(setting.epochs, setting.batch, setting.lr)
    sent = [train_client(net, x[i], y[i], how, client=i) for i in range(clients)]
    update = client_updates(sent)[0]
    scale = {"mean": [data.mean], "std": [data.std]}
    cpu = time.process_time()
    scores = leakwatch.score_update(
        net,
        x,
        y,
        update,
        ["lavp", "i2f", "norms"],
        prior_std=data.prior_std,
        prior_mean=data.prior_mean,
        max_memory=512,
        products=products,
        **scale,
    )
    scored = time.process_time() - cpu
    cpu = time.process_time()
    if near is None:
        found = leakwatch.attack_update(net, update, "sme", steps=steps, **scale)
    else:
        found = beside(net, update, x, near, float(scores.alpha.median()), steps, scale)
    attacked = time.process_time() - cpu
    images = align(found.images, x).flatten(0, 1)
    flat = x.flatten(0, 1)
    psnr = quality(images, flat, metrics=("psnr",), **scale)["psnr"]
    print(f"\n{setting}; {clients} clients, {steps} steps of SME")
    if setting.rounds:
        print(f"  test accuracy {accuracy(net, setting.size):.1%}")
    print(
        f"  at the truth: α {row(scores.alpha)}, similarity {row(scores.similarity)}, "
        f"‖δ‖/‖g‖ {row(scores.mismatch)}"
    )
    print(
        f"  attack: α {row(found.alpha)}, 1 − cos {row(found.loss)}, PSNR "
        f"{row(psnr)} dB; CPU seconds: scores {scored:.0f}, attack {attacked:.0f}"
    )
    for name in PREDICTED:
        values = scores[name].flatten()
        good = torch.isfinite(values)
        apart = (values[good] - psnr[good]).abs().median() if good.any() else np.nan
        print(
            f"  {name:22} median {row(values[good])} dB for {int(good.sum())} of "
            f"{len(values)}, off by {float(apart):.1f} dB in the median"
        )
    columns = {name: scores[name].flatten().numpy() for name in SCORES}
    columns["joint_i2f_bayes"] = scores["joint_i2f_bayes"].flatten().numpy()
    columns |= baselines(flat, data.mean, data.std)
    for name, column in columns.items():
        print(f"  {name:22} {spearman(column, psnr.numpy())}", flush=True)


def beside(
    net: nn.Module,
    update: leakwatch.WeightUpdate,
    x: Tensor,
    radius: float,
    alpha: float,
    steps: int,
    scale: Mapping[str, list[float]],
) -> leakwatch.UpdateReconstruction:
    """SME from beside the samples, in small steps, from the clients' usual best α."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    attack = SurrogateAttack(steps=steps, lr=0.02, alpha=alpha)
    return attack.run(
        GradientMap(net),
        update,
        pixels=PixelScale(scale["mean"], scale["std"]),
        start=Start.normal(),
        initial=(x + radius * noise)[None],
    )


def row(values: Tensor) -> str:
    """Median and range."""
    if not len(values):
        return "–"
    low, high = float(values.min()), float(values.max())
    return f"{float(values.median()):.3g} ({low:.3g} to {high:.3g})"


def main() -> None:
    """Prints one table for each setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--products", type=int, default=150)
    parser.add_argument("--only", type=int, help="position of a setting")
    parser.add_argument(
        "--near",
        type=float,
        help="start at this distance from every pixel, in network-input units",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = SETTINGS if args.only is None else (SETTINGS[args.only],)
    for setting in settings:
        measure(setting, args.clients, args.steps, args.products, args.near)


if __name__ == "__main__":
    main()
