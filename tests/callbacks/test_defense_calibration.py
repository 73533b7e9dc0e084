"""What optimisers consume, against closed forms: the noise has the size stated."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from defense_cases import SIZE, Known, Two, batches, criterion, inputs
from lightning.pytorch.plugins import MixedPrecision
from monitor_cases import Tiny, dataset, fit
from torch import Tensor
from torch.utils.data import DataLoader

from leakwatch import GradientMap
from leakwatch.callbacks import GradientDefense
from leakwatch.defenses import (
    DPSGD,
    Budget,
    EigenNoise,
    GaussianNoise,
    GradientPruning,
    MixUp,
    Samples,
)

REPEATS = 200
STD = 0.3


def clean(x: Tensor, batch: int, accumulated: int, reduction: str) -> Tensor:
    """The gradients that steps would consume unclipped, ``(steps, d_θ)``."""
    per_batch = x.view(-1, accumulated, batch, x.shape[1])
    each = per_batch.mean(2) if reduction == "mean" else per_batch.sum(2)
    return each.mean(1)


def clipped(g: Tensor, value: float, algorithm: str) -> Tensor:
    if algorithm == "value":
        return g.clamp(-value, value)
    return g * (value / g.norm(dim=1, keepdim=True)).clamp(max=1)


def assert_calibrated(consumed: list[Tensor], expected: Tensor, std: float) -> None:
    noise = (torch.stack(consumed) - expected).double()
    assert noise.shape == (REPEATS, SIZE)
    # 12,000 draws: the standard error is 0.65 %, and 0.9 % of σ for the mean.
    assert float(noise.std()) == pytest.approx(std, rel=0.05)
    assert abs(float(noise.mean())) < 4 * std / math.sqrt(noise.numel())
    # Independent from step to step.
    repeated = float((noise[1:] * noise[:-1]).mean()) / std**2
    assert abs(repeated) < 4 / math.sqrt(noise.numel())


@pytest.mark.parametrize(
    ("accumulated", "reduction", "clip"),
    [
        (1, "mean", None),
        (4, "mean", "norm"),
        (1, "sum", "value"),
        (4, "sum", None),
    ],
)
def test_noise_on_gradients_has_the_size_stated(
    accumulated: int, reduction: str, clip: str | None, tmp_path: Path
) -> None:
    x, module = inputs(REPEATS * accumulated * 2), Known(reduction)
    defense = GradientDefense(GaussianNoise(Budget(STD, "std")))
    changes: dict[str, Any] = {}
    expected = clean(x, 2, accumulated, reduction)
    if clip is not None:
        changes = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": clip}
        expected = clipped(expected, 0.5, clip)
    fit(
        tmp_path, defense, module=module, data=batches(x, 2),
        accumulate_grad_batches=accumulated, **changes,
    )  # fmt: skip
    assert_calibrated(module.recording.consumed, expected, STD)
    found = defense.summary
    assert (found.steps, found.skipped) == (REPEATS, 0)
    assert found.asked == pytest.approx(STD * math.sqrt(SIZE), rel=1e-12)
    noise = torch.stack(module.recording.consumed) - expected
    assert found.std == pytest.approx(float(noise.square().mean().sqrt()), rel=1e-4)
    assert found.applied == pytest.approx(found.std * math.sqrt(SIZE), rel=1e-6)
    assert found.mismatch < 1e-5


def test_two_optimisers_in_manual_optimisation(tmp_path: Path) -> None:
    x, module = inputs(REPEATS * 2), Two()
    defense = GradientDefense(GaussianNoise(Budget(STD, "std")))
    run = fit(tmp_path, defense, module=module, data=batches(x, 2))
    expected = clean(x, 2, 1, "mean")
    first, second = (r.consumed for r in module.recordings)
    assert_calibrated(first, expected, STD)
    assert_calibrated(second, clipped(expected, 0.5, "norm"), STD)
    assert defense.summary.steps == 2 * REPEATS
    kinds = ("asked_norm", "applied_norm", "applied_std", "relative_norm", "seconds")
    assert set(run.logged_metrics) == {
        f"defense/{i}/{kind}" for i in (0, 1) for kind in kinds
    }


def test_noise_in_bfloat16_mixed_precision(tmp_path: Path) -> None:
    x, module = inputs(REPEATS * 2), Known()
    defense = GradientDefense(GaussianNoise(Budget(STD, "std")))
    fit(
        tmp_path, defense, module=module, data=batches(x, 2), precision="bf16-mixed"
    )  # fmt: skip
    # The gradient has three digits, 1e-3 beside noise of 0.3.
    assert_calibrated(module.recording.consumed, clean(x, 2, 1, "mean"), STD)
    assert defense.summary.mismatch < 1e-5


def test_a_loss_scaler_does_not_scale_the_noise_and_skips_are_counted(
    tmp_path: Path,
) -> None:
    x, module = inputs((REPEATS + 1) * 2), Known()
    x[100] = math.inf
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6)
    defense = GradientDefense(GaussianNoise(Budget(STD, "std")))
    fit(
        tmp_path, defense, module=module, data=batches(x, 2),
        plugins=MixedPrecision("16-mixed", "cpu", scaler),
    )  # fmt: skip
    kept = torch.cat([x[:100], x[102:]])
    assert_calibrated(module.recording.consumed, clean(kept, 2, 1, "mean"), STD)
    assert (defense.summary.steps, defense.summary.skipped) == (REPEATS, 1)


def test_pruning_by_layer_needs_no_sizes(tmp_path: Path) -> None:
    module = Tiny()
    defense = GradientDefense(GradientPruning(0.5, "layer"))
    fit(tmp_path, defense, module=module, limit_train_batches=1)
    zeros = [int((p.grad == 0).sum()) for p in module.parameters()]  # type: ignore[union-attr]
    assert zeros == [48, 3, 9, 1]
    found = defense.summary
    assert found.applied == pytest.approx(found.asked, rel=1e-6)
    assert found.applied > 0


@pytest.mark.parametrize(("accumulated", "reduction"), [(1, "mean"), (4, "sum")])
def test_dp_sgd_is_clipped_samples_and_noise_on_their_sum(
    accumulated: int, reduction: Any, tmp_path: Path
) -> None:
    steps, size = 5, 2000
    x, module = inputs(steps * accumulated * 2, size), Known(reduction, size)
    defense = GradientDefense(
        DPSGD(10.0, 0.1), reduction=reduction, criterion=criterion
    )
    fit(
        tmp_path, defense, module=module, data=batches(x, 2),
        accumulate_grad_batches=accumulated,
    )  # fmt: skip
    expected = clean(clipped(x, 10.0, "norm"), 2, accumulated, reduction)
    noise = torch.stack(module.recording.consumed) - expected
    std = 0.1 * 10.0 / (2 if reduction == "mean" else 1) / accumulated
    assert noise.shape == (steps, size)
    assert float(noise.std()) == pytest.approx(std, rel=0.05)
    assert defense.summary.std == pytest.approx(std, rel=0.05)
    bias = (expected - clean(x, 2, accumulated, reduction)).norm(dim=1)
    asked = (bias.square() + std**2 * size).mean().sqrt()
    assert defense.summary.asked == pytest.approx(float(asked), rel=1e-4)


def test_unequal_micro_batches_bound_each_sample_by_the_largest_part(
    tmp_path: Path,
) -> None:
    x, module = inputs(3), Known()
    defense = GradientDefense(DPSGD(3.0, 0.0), criterion=criterion)
    fit(
        tmp_path, defense, module=module, data=batches(x, 2), accumulate_grad_batches=2
    )  # fmt: skip
    # Parts are 1/4, 1/4 and 1/2, so the first two may be half as long.
    rows = clipped(x * torch.tensor([[0.5], [0.5], [1.0]]), 3.0, "norm")
    (found,) = module.recording.consumed
    torch.testing.assert_close(found, rows.sum(0) / 2, rtol=1e-5, atol=1e-6)


def test_an_incomplete_window_keeps_the_division(tmp_path: Path) -> None:
    x, module = inputs(2), Known()
    defense = GradientDefense(DPSGD(3.0, 0.0), criterion=criterion)
    fit(
        tmp_path, defense, module=module, data=batches(x, 2), accumulate_grad_batches=2
    )  # fmt: skip
    (found,) = module.recording.consumed
    expected = clipped(x, 3.0, "norm").mean(0) / 2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Once(Tiny):
    """Never moves; sums over samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * len(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_mixup_consumes_the_gradient_of_mixtures(tmp_path: Path) -> None:
    module = Once()
    defense = GradientDefense(MixUp(0.7), reduction="sum", seed=5)
    data: Any = DataLoader(dataset(4), 2)
    fit(tmp_path, defense, module=module, data=data, accumulate_grad_batches=2)
    samples = Samples(GradientMap(module), *dataset(4).tensors)
    made = MixUp(0.7).protect_batch(
        samples.gradient,
        generator=torch.Generator().manual_seed(5),
        samples=samples,
        reduction="sum",
    )
    found = torch.cat([p.grad.flatten() for p in module.parameters()])  # type: ignore[union-attr]
    torch.testing.assert_close(found, made.gradient[0] / 2, rtol=1e-5, atol=1e-6)
    assert defense.summary.applied > 0.01
    assert defense.summary.applied == pytest.approx(defense.summary.asked, rel=1e-5)


def test_eigen_noise_has_its_budget_on_the_clipped_gradient(tmp_path: Path) -> None:
    module = Once()
    noise = EigenNoise(Budget(0.02, "norm"), "single", coefficients="sign")
    defense = GradientDefense(noise, reduction="sum")
    data = batches(dataset(2).tensors[0], 1)
    fit(
        tmp_path, defense, module=module, data=data, gradient_clip_val=0.1
    )  # fmt: skip
    found = defense.summary
    assert found.asked == pytest.approx(0.02, rel=1e-6)
    # One sample, one direction, signs: every draw has this norm.
    assert found.applied == pytest.approx(0.02, rel=1e-4)
    assert found.relative == pytest.approx(0.2, rel=1e-4)
