from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES, CLASSES, Case, mlp
from torch import Tensor, nn

from leakwatch.derivatives import GradientMap

BY_NAME = {case.name: case for case in CASES}


class TestCheck:
    x, y = BY_NAME["mlp"].data(4, torch.float32)

    def test_lets_good_data_pass(self, case: Case) -> None:
        x, y = case.data(3)
        at = GradientMap(case.module(), dtype=torch.float64)
        at.check(x, y)
        assert at.path == "auto"

    @pytest.mark.parametrize("label", [-1, CLASSES, 255])
    def test_labels_of_all_samples(self, label: int) -> None:
        y = self.y.clone()
        y[3] = label
        at = GradientMap(mlp())
        with pytest.raises(ValueError, match=rf"label {label} of sample 3.*0 to 2"):
            at.check(self.x, y)
        assert bool(at(self.x, y)[3].isnan().all())
        assert bool(at(self.x, y)[:3].isfinite().all())

    @pytest.mark.parametrize("shape", [(28, 28), (1, 8, 8), (3, 28, 28)])
    def test_inputs_that_do_not_fit_are_told_as_such(
        self, shape: tuple[int, ...]
    ) -> None:
        net = nn.Sequential(nn.Conv2d(1, 2, 5), nn.Flatten(), nn.Linear(2 * 24**2, 3))
        x, y = torch.rand(2, *shape), torch.tensor([0, 2])
        with pytest.raises(ValueError, match="the network can't take inputs") as raised:
            GradientMap(net).check(x, y)
        assert str(shape) in str(raised.value)
        assert "as training gives it" in str(raised.value)
        assert isinstance(raised.value.__cause__, RuntimeError)

    def test_other_errors_of_a_network_are_its_own(self) -> None:
        class Broken(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = mlp()

            def forward(self, x: Tensor) -> Tensor:
                raise RuntimeError("no licence found")

        with pytest.raises(RuntimeError, match="no licence found"):
            GradientMap(Broken()).check(self.x, self.y)

    def test_softmax_at_the_end_is_noticed(self) -> None:
        torch.manual_seed(0)
        x, y = torch.rand(2, 4), torch.tensor([0, 2])
        gradients = GradientMap(nn.Sequential(nn.Linear(4, 3), nn.Softmax(dim=1)))
        gradients.check(x, y)
        assert any("cross-entropy applies it once more" in n for n in gradients.notes)
        plain = GradientMap(nn.Sequential(nn.Linear(4, 3), nn.Sigmoid()))
        plain.check(x, y)
        assert plain.notes == ()

    def test_what_a_forward_shows(self) -> None:
        class Output(nn.Module):
            def __init__(self, f: Callable[[Tensor], Any]) -> None:
                super().__init__()
                self.net, self.f = mlp(), f

            def forward(self, x: Tensor) -> Any:
                return self.f(self.net(x))

        for f, kind, words in (
            (lambda z: (z, z), TypeError, "a tuple"),
            (lambda z: {"logits": z}, TypeError, "a dict"),
            (lambda z: z[:, :1], ValueError, "at least 2 classes"),
            (lambda z: z[:, :, None], ValueError, "shape"),
            (lambda z: z * float("nan"), ValueError, "loss of sample 0 is nan"),
        ):
            with pytest.raises(kind, match=words):
                GradientMap(Output(f)).check(self.x, self.y)
        with pytest.raises(
            TypeError, match=r"integer class labels.*y.long\(\).*\(module, x, y\)"
        ):
            GradientMap(mlp()).check(self.x, self.y.float())
        broken = self.x.clone()
        broken[2, 0, 1, 1] = torch.nan
        with pytest.raises(ValueError, match="sample 2 holds NaN"):
            GradientMap(mlp()).check(broken, self.y)
        with pytest.raises(ValueError, match="one loss per sample"):
            GradientMap(mlp(), lambda m, x, y: m(x)).check(self.x, self.y)
