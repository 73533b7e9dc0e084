"""Synthetic runs: what a monitor would have written, without a monitor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leakwatch.reporting import RiskLedger, Row

QUANTITIES = {
    "i2f_bayes_psnr": {
        "unit": "dB",
        "direction": "higher = more exposed",
        "meaning": "Predicted PSNR of the best reconstruction under a Gaussian prior.",
        "source": "DESIGN section 3",
    },
    "i2f_psnr": {
        "unit": "dB",
        "direction": "higher = more exposed",
        "meaning": "Predicted PSNR of the worst-case reconstruction.",
        "source": "I²F, Eq. 4",
    },
    "i2f": {
        "unit": "pixel units",
        "direction": "higher = less exposed",
        "meaning": "Norm of the predicted recovery error.",
        "source": "I²F, Eq. 4",
    },
    "lavp_l2_max": {
        "unit": "",
        "direction": "higher = less exposed",
        "meaning": "Largest eigenvalue of JᵀJ.",
        "source": "LAVP, Theorem 3",
    },
    "lavp_l2_min": {
        "unit": "",
        "direction": "higher = less exposed",
        "meaning": "Smallest eigenvalue of JᵀJ.",
        "source": "LAVP, Theorem 3",
    },
    "loss": {"unit": "nat", "direction": "", "meaning": "Cross-entropy.", "source": ""},
    "seconds": {"unit": "s", "direction": "", "meaning": "Wall time of the probe."},
}


def step_rows(
    epoch: int,
    samples: int,
    classes: int,
    generator: np.random.Generator,
    status: Callable[[str, int], str | None],
) -> list[Row]:
    rows: list[Row] = []
    ease = np.random.default_rng(1).normal(0.0, 3.5, samples)
    for place in range(samples):
        label = place % classes
        psnr = 22.0 + ease[place] + 0.35 * label % 5 - 0.25 * epoch
        psnr += float(generator.normal(0.0, 0.6))
        values = {
            "i2f_bayes_psnr": psnr,
            "i2f_psnr": psnr - 2.5,
            "i2f": 28.0 * 10 ** (-psnr / 20),
            "lavp_l2_max": float(np.exp(ease[place] - 0.2 * epoch)),
            "lavp_l2_min": float(np.exp(ease[place] - 18.0)),
            "loss": float(np.exp(-0.1 * epoch) * (1.0 + 0.1 * ease[place] ** 2)),
        }
        for name, value in values.items():
            said = status(name, place) or "ok"
            kept = value if said == "ok" or said.startswith("est") else float("nan")
            rows.append(
                Row(epoch, 40 * epoch, 100 + 7 * place, label, name, kept, said)
            )
    rows.append(Row(epoch, 40 * epoch, None, None, "seconds", 2.1 + 0.1 * epoch))
    share = 0.02 + 0.01 / (1 + epoch)
    rows.append(Row(epoch, 40 * epoch, None, None, "time_fraction", share))
    return rows


def spectra(epoch: int, samples: int, rank: int) -> dict[str, Any]:
    generator = np.random.default_rng(epoch)
    decay = np.exp(-np.arange(rank) * 14.0 / rank - 0.1 * epoch)
    values = decay * np.exp(generator.normal(0.0, 0.5, (samples, 1)))
    return {
        "eigenvalues": -np.sort(-values, axis=1),
        "sample": 100 + 7 * np.arange(samples),
        "class": np.arange(samples) % 10,
        "epoch": epoch,
        "step": 40 * epoch,
        "floor": 1e-6 * values[:, 0],
    }


def some_trouble(name: str, place: int) -> str | None:
    if name == "lavp_l2_min" and place % 5 == 0:
        return "unresolved: below the precision floor 2.1e-7 of float32"
    if place == 3 and name.startswith("i2f"):
        return "failed: out of memory after two retries"
    if name == "lavp_l2_max" and place == 4:
        return "estimated: residual 2e-4 after 60 products"
    return None


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RiskLedger]:
    """Return a function that writes a synthetic run and returns its ledger."""

    def make(
        *,
        epochs: tuple[int, ...] = (0, 5, 10, 15, 20),
        samples: int = 20,
        classes: int = 10,
        pictures: int | None = 3,
        rank: int | None = 96,
        status: Callable[[str, int], str | None] = some_trouble,
        metadata: dict[str, Any] | None = None,
        name: str = "run",
    ) -> RiskLedger:
        ledger = RiskLedger(tmp_path / name / "leakwatch", run="lenet on digits")
        names = [f"class {label}" for label in range(classes)]
        ledger.write_metadata(
            {
                "class_names": names,
                "units": "pixel",
                "data_range": 1.0,
                "quantities": QUANTITIES,
                "config": {"solver": "exact", "noise_std": 0.01, "scores": ["i2f"]},
                "versions": {"torch": "2.14", "leakwatch": "0.1.0"},
            }
            if metadata is None
            else metadata
        )
        generator = np.random.default_rng(0)
        for epoch in epochs:
            ledger.append(
                step_rows(epoch, samples, classes, generator, status),
                None if rank is None else spectra(epoch, samples, rank),
            )
        if pictures is not None:
            steps = np.linspace(0, 255, 28)
            ramp = steps[:, None, None] * 0.5 + steps[None, :, None] * 0.5
            shift = 9 * np.arange(samples)[:, None, None, None]
            pixels = (ramp[None] + shift + 60 * np.arange(pictures)) % 256
            ledger.write_probes(
                pixels.astype(np.uint8),
                100 + 7 * np.arange(samples),
                np.arange(samples) % classes,
            )
        return ledger

    return make
