"""Noise shaped by samples is as large as asked beside the gradient consumed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from defense_cases import Recording
from monitor_cases import Tiny, dataset, fit
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader

from leakwatch import GradientMap
from leakwatch.callbacks import GradientDefense
from leakwatch.callbacks._defense.samples import combination, relative_to
from leakwatch.defenses import (
    Allocation,
    Budget,
    Defense,
    EigenNoise,
    GaussianNoise,
    InputSpace,
    Proportional,
    RowNorms,
    Samples,
    Shared,
    Smallest,
    Waterfill,
)

ASKED = 0.3
SMALLEST, PROPORTIONAL, WATERFILL = Smallest(8), Proportional(), Waterfill(0.6)
ROW_NORMS, INPUT_SPACE = RowNorms(probes=4), InputSpace(5.0)
# After which the mean size of the noise says something.
STEPS: dict[Allocation, int] = {
    SMALLEST: 25,
    PROPORTIONAL: 40,
    WATERFILL: 40,
    ROW_NORMS: 12,
    INPUT_SPACE: 4,
}


class Normalised(Tiny):
    """Never moves, and keeps its running statistics, so that every step is the same."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(6, momentum=0.0)
        norm.running_var.mul_(0.05)  # type: ignore[union-attr, operator]
        super().__init__(
            nn.Sequential(
                nn.Flatten(), nn.Linear(16, 6), norm, nn.Sigmoid(), nn.Linear(6, 3)
            )
        )

    def configure_optimizers(self) -> Any:
        self.recording = Recording(self.parameters(), lr=0.0)
        return self.recording


def trained_on(accumulated: int, clip: float | None) -> Tensor:
    """The gradient that an undefended step consumes."""
    module = Normalised().train()
    x, y = dataset(3 * accumulated).tensors
    for part, labels in zip(x.split(3), y.split(3), strict=True):
        (F.cross_entropy(module(part), labels) / accumulated).backward()
    g = torch.cat([p.grad.flatten() for p in module.parameters()])  # type: ignore[union-attr]
    return g if clip is None else g * (clip / g.norm()).clamp(max=1)


def run(
    root: Path,
    defense: Any,
    accumulated: int,
    clip: float | None,
    steps: int,
    **keywords: Any,
) -> tuple[list[Tensor], GradientDefense]:
    module = Normalised()
    watched = GradientDefense(defense, **keywords)
    same: Any = ConcatDataset([dataset(3 * accumulated)] * steps)
    match = "differs by .* beside the gradient consumed, but its shape is that of the s"
    with pytest.warns(UserWarning, match=match):
        fit(
            root, watched, module=module, data=DataLoader(same, 3),
            accumulate_grad_batches=accumulated, gradient_clip_val=clip,
        )  # fmt: skip
    return module.recording.consumed, watched


# Over several micro-batches, one for each way to find bases: kept, estimated, own.
@pytest.mark.parametrize(
    ("allocation", "accumulated", "clip"),
    [
        *((allocation, 1, 0.1) for allocation in STEPS),
        *((allocation, 4, None) for allocation in (SMALLEST, ROW_NORMS, INPUT_SPACE)),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_the_size_is_the_one_asked_for_beside_what_is_consumed(
    allocation: Allocation,
    accumulated: int,
    clip: float | None,
    tmp_path: Path,
) -> None:
    steps = STEPS[allocation]
    bases = {"refresh_every": 2 * steps} if allocation.name != "diagonal" else {}
    # Signs: the size varies only as far as noise of different samples overlaps.
    noise = EigenNoise(Budget(ASKED), allocation, "sign")
    consumed, watched = run(tmp_path, noise, accumulated, clip, steps, **bases)
    clean = trained_on(accumulated, clip)
    if clip is not None:
        assert float(clean.norm()) == pytest.approx(clip, rel=1e-5)
    delta = (torch.stack(consumed) - clean).double()
    assert len(delta) == steps
    size = float(delta.square().sum(1).mean().sqrt()) / float(clean.double().norm())
    exact = allocation.name == "input_space"
    assert size == pytest.approx(ASKED, rel=2e-3 if exact else 0.05)
    if exact:
        sizes = delta.norm(dim=1) / clean.double().norm()
        assert float((sizes / ASKED - 1).abs().max()) < 2e-3
    found = watched.summary
    assert found.relative == pytest.approx(size, rel=1e-4)
    stated = found.asked / float(clean.double().norm())
    assert stated == pytest.approx(ASKED, rel=2e-3 if exact else 1e-4)
    assert watched._tally.off is None


def test_the_gradients_of_samples_alone_are_far_from_what_is_consumed() -> None:
    """Or else the tests above could not fail."""
    samples = Samples(GradientMap(Normalised()), *dataset(3).tensors)
    alone = float(samples.gradient.mean(0).norm())
    assert alone < 0.6 * float(trained_on(1, None).norm())


def test_a_budget_that_is_not_relative_is_left_alone(tmp_path: Path) -> None:
    noise = EigenNoise(Budget(0.02, "norm"), InputSpace(5.0))
    consumed, watched = run(tmp_path, noise, 2, 0.1, 3, refresh_every=9)
    clean = trained_on(2, 0.1)
    for one in consumed:
        assert float((one - clean).norm()) == pytest.approx(0.02, rel=2e-3)
    assert watched.summary.asked == pytest.approx(0.02, rel=2e-3)


def test_only_relative_budgets_of_noise_shaped_by_samples_are_restated() -> None:
    assert relative_to(EigenNoise(Budget(0.5)), 4.0).budget == Budget(2.0, "norm")
    for kept in (
        EigenNoise(Budget(0.5, "norm")),
        EigenNoise(Budget(0.5, "std")),
        GaussianNoise(Budget(0.5)),
        Foreign(),
    ):
        assert relative_to(kept, 4.0) is kept
    own = relative_to(Own(Budget(0.5)), 4.0)
    assert own == Own(Budget(2.0, "norm"))


def test_unequal_parts_leave_the_budget_that_of_the_message() -> None:
    x, y = dataset(3).tensors
    samples = Samples(GradientMap(Normalised(), dtype=torch.float64), x.double(), y)
    share = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    defense = relative_to(EigenNoise(Budget(0.5), InputSpace(5.0)), 0.06)
    message, clean, mean, variance = combination(
        defense, samples, share, "mean", torch.Generator()
    )
    torch.testing.assert_close(clean, share @ samples.gradient)
    assert torch.equal(mean, clean)
    assert float((message - clean).norm()) == pytest.approx(0.03, rel=1e-3)
    assert variance == pytest.approx(0.03**2, rel=2e-3)


@dataclass(frozen=True)
class Own(Defense):
    """A user's defense that can be given another budget."""

    budget: Budget
    name: ClassVar[str] = "own"
    needs: ClassVar[Any] = "jacobian"

    def protect(self, gradient: Tensor, **keywords: Any) -> Shared:
        raise NotImplementedError

    def protect_batch(self, gradient: Tensor, **keywords: Any) -> Shared:
        raise NotImplementedError


class Foreign(Defense):
    """And one that can't."""

    name, needs, budget = "foreign", "jacobian", Budget(0.5)
    protect, protect_batch = Own.protect, Own.protect_batch
