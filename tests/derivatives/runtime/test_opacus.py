"""A network that Opacus has wrapped is scored as the one inside."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import leakwatch

opacus = pytest.importorskip("opacus")


def hooks(module: nn.Module) -> list[int]:
    kinds = ("_forward_hooks", "_backward_hooks", "_forward_pre_hooks")
    parts = list(module.modules())
    return [id(h) for m in parts for kind in kinds for h in getattr(m, kind).values()]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["hooks", "functorch", "ghost", "ew"])
@pytest.mark.parametrize("inside", [False, True], ids=["itself", "a part"])
def test_scored_as_the_network_inside(kind: str, inside: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3))
    plain = copy.deepcopy(net)
    wrapped = opacus.grad_sample.wrap_model(net, grad_sample_mode=kind)
    module = nn.Sequential(wrapped) if inside else wrapped
    x, y = torch.rand(2, 1, 6, 6), torch.tensor([0, 2])
    before = hooks(module)
    ours, right = (
        leakwatch.score(m, x, y, ["lavp", "bayes"], noise_std=1e-3)
        for m in (module, plain)
    )
    for name in right:
        torch.testing.assert_close(ours[name], right[name], rtol=1e-6, atol=0)
        assert ours.status[name] == right.status[name]
    assert hooks(module) == before
    F.cross_entropy(module(x), y).backward()
    for p in wrapped.parameters():  # its hooks work as they did
        if kind == "ghost":  # norms alone, of which the gradients are clipped later
            assert p._norm_sample.shape == (2,)
        else:
            assert p.grad_sample.shape == (2, *p.shape)
