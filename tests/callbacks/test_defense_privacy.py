"""ε of a training run: what GradientDefense logs and keeps."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from defense_cases import Known, batches, criterion, inputs
from monitor_cases import fit

from leakwatch.callbacks import GradientDefense
from leakwatch.defenses import (
    DPSGD,
    Budget,
    Defense,
    GaussianNoise,
    GradientPruning,
    privacy_loss,
)

pytest.importorskip("opacus")

DELTA = 1e-3


def run(
    defense: Defense, folder: Path, epochs: int = 2, **options: Any
) -> tuple[L.Trainer, GradientDefense]:
    callback = GradientDefense(
        defense, criterion=criterion, delta=DELTA, accountant="rdp"
    )
    trainer = fit(
        folder,
        callback,
        module=Known(),
        data=batches(inputs(12), 3),
        max_epochs=epochs,
        **options,
    )
    return trainer, callback


def test_epsilon_of_dp_sgd_is_that_of_its_steps(tmp_path: Path) -> None:
    defense = DPSGD(1.0, 0.8)
    trainer, callback = run(defense, tmp_path)
    expected = privacy_loss(
        defense, steps=8, sample_rate=3 / 12, delta=DELTA, accountant="rdp"
    )
    assert callback.privacy is not None
    assert callback.privacy.epsilon == expected.epsilon
    assert callback.privacy.status.word == "estimated"  # shuffled, not drawn
    logged = float(trainer.callback_metrics["defense/epsilon"])
    assert logged == pytest.approx(expected.epsilon, rel=1e-6)


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    defense = DPSGD(1.0, 0.8)
    _, callback = run(defense, tmp_path, accumulate_grad_batches=2)
    expected = privacy_loss(
        defense, steps=4, sample_rate=6 / 12, delta=DELTA, accountant="rdp"
    )
    assert callback.privacy is not None
    assert callback.privacy.epsilon == expected.epsilon


def test_gaussian_noise_on_clipped_gradients_has_one(tmp_path: Path) -> None:
    noise = GaussianNoise(Budget(3.0, "std"))
    _, callback = run(noise, tmp_path, gradient_clip_val=0.5)
    # Once in each of two epochs, a message of norm 0.5 becomes any other of it.
    expected = privacy_loss(
        noise,
        steps=2,
        sample_rate=1.0,
        delta=DELTA,
        accountant="rdp",
        sensitivity=1.0,
    )
    assert callback.privacy is not None
    assert callback.privacy.epsilon == expected.epsilon
    assert callback.privacy.status.word == "ok"


@pytest.mark.parametrize(
    ("defense", "said"),
    [
        (GaussianNoise(Budget(3.0, "std")), "nothing bounds"),
        (GradientPruning(0.5), "not of pruning"),
    ],
)
def test_what_has_no_epsilon_says_so_once(
    defense: Defense, said: str, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=f"no ε is logged: undefined: .*{said}") as got:
        trainer, callback = run(defense, tmp_path)
    assert sum("no ε is logged" in str(w.message) for w in got) == 1
    assert "defense/epsilon" not in trainer.callback_metrics
    assert callback.privacy is not None
    assert math.isnan(callback.privacy.epsilon)


def test_without_delta_nothing_is_said(tmp_path: Path) -> None:
    callback = GradientDefense(DPSGD(1.0, 0.8), criterion=criterion)
    trainer = fit(tmp_path, callback, module=Known(), data=batches(inputs(6), 3))
    assert callback.privacy is None
    assert "defense/epsilon" not in trainer.callback_metrics


def test_training_goes_on_without_opacus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with pytest.warns(UserWarning, match="no ε is logged: not computed"):
        trainer, _ = run(DPSGD(1.0, 0.8), tmp_path)
    assert trainer.global_step == 8


@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_a_delta_out_of_range_is_refused(delta: float) -> None:
    with pytest.raises(ValueError, match="delta"):
        GradientDefense(DPSGD(1.0, 1.0), delta=delta)
