"""What leaves a client undefended is found by comparing parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from monitor_cases import Tiny, TinyVal, fit, loader
from torch import nn
from torch.nn import functional as F

from leakwatch.callbacks import GradientDefense
from leakwatch.defenses import Budget, GaussianNoise


class ByHand(Tiny):
    """Updates some of its parameters without an optimiser of Lightning's."""

    def __init__(self, past: tuple[str, ...], how: str, rate: float = 0.1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.past, self.how, self.rate = past, how, rate

    def parts(self, past: bool) -> list[nn.Parameter]:
        named = self.named_parameters()
        return [p for name, p in named if (name in self.past) == past]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.zero_grad()
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        theirs = self.parts(past=True)
        if self.how == "own optimiser":
            torch.optim.SGD(theirs, lr=self.rate).step()
        for p in theirs if self.how != "own optimiser" else ():
            if self.how == "data":
                p.data -= self.rate * p.grad
            elif self.how == "storage":
                p.data = p.data - self.rate * p.grad
            else:
                with torch.no_grad():
                    p.sub_(self.rate * p.grad)
        for optimizer in [self.optimizers()] if self.parts(past=False) else []:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        held = self.parts(past=False)
        return torch.optim.SGD(held, lr=0.1) if held else None


EVERY = tuple(name for name, _ in Tiny().named_parameters())


@pytest.mark.filterwarnings("ignore:.*returned `None`, this fit will run:UserWarning")
@pytest.mark.parametrize("how", ["in place", "data", "storage", "own optimiser"])
@pytest.mark.parametrize("past", [EVERY, EVERY[-1:]], ids=["all", "one"])
def test_updates_past_every_hook_stop_training(
    past: tuple[str, ...], how: str, tmp_path: Path
) -> None:
    defense = GradientDefense(GaussianNoise(Budget(0.5, "std")))
    with pytest.raises(RuntimeError, match="changed outside of a defended step") as at:
        fit(tmp_path, defense, module=ByHand(past, how, rate=1e-6))
    assert past[0] in str(at.value)
    assert EVERY[0] in past or EVERY[0] not in str(at.value)


def test_an_update_in_a_hook_between_batches_stops_training(tmp_path: Path) -> None:
    class Between(Tiny):
        def on_train_batch_end(self, *_: Any) -> None:
            with torch.no_grad():
                next(self.parameters()).mul_(0.999)

    defense = GradientDefense(GaussianNoise(Budget(0.5, "std")))
    with pytest.raises(RuntimeError, match="changed outside of a defended step"):
        fit(tmp_path, defense, module=Between())


def test_what_optimisers_and_forwards_do_to_weights_is_no_step_past(
    tmp_path: Path,
) -> None:
    class Clamped(TinyVal):
        """Its optimiser clamps weights, its forward renormalises an embedding."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(3, 4, max_norm=0.1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.cross_entropy(self(batch[0]), batch[1])
            return loss + self.table(batch[1]).square().sum()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

            def clamp(*_: Any) -> None:
                with torch.no_grad():
                    for p in self.parameters():
                        p.clamp_(-0.1, 0.1)

            optimizer.register_step_post_hook(clamp)
            return optimizer

    defense = GradientDefense(GaussianNoise(Budget(0.5, "std")))
    averaging = L.pytorch.callbacks.EMAWeightAveraging()
    fit(
        tmp_path,
        defense,
        averaging,
        module=Clamped(),
        val=loader(),
        max_epochs=2,
        val_check_interval=2,
    )
    assert defense.summary.steps == 12
