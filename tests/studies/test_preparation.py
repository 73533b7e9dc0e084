"""What comes before a network is part of it: studies, attacks and scores with
``prepare`` are those of a network that does it inside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leakwatch
from leakwatch.studies import compare_initializations, trade_off
from studies.problems import FAST, network, samples


class Normalise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - 0.45) / 0.2


def inside() -> nn.Module:
    return nn.Sequential(Normalise(), *network())


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7, equal_nan=True)


def recommended(net: nn.Module, **how: Any) -> Any:
    x, y = samples()
    got = leakwatch.recommend_noise(net, x, y, target_psnr=15.0, check=2, **how)
    return (
        [got.noise_std, got.predicted],
        [(p.sample, p.needed.number, p.psnr.number) for p in got.probes],
        [(c.sample, c.psnr, c.predicted, c.conclusive) for c in got.checks],
    )


def unequal(net: nn.Module, **how: Any) -> Any:
    x, y = samples(9)
    got = leakwatch.unfairness(net, x, y, 0.05, dtype=torch.float64, **how)
    return (
        [(s.sample, s.psnr.number) for s in got.samples],
        [(c.label, c.psnr, c.low, c.high, c.noise_std.number) for c in got.classes],
    )


def compared(net: nn.Module, **how: Any) -> Any:
    x, y = samples()

    def constant(module: nn.Module, _: torch.Generator | None) -> None:
        for i, p in enumerate(module.parameters()):
            p.copy_(torch.linspace(-0.4, 0.5, p.numel()).view_as(p).roll(i))

    got = compare_initializations(
        net, x, y, [constant], seeds=1, attacks=["gs"], steps=5, repeats=1, **how
    )
    return [p.value for p in got.points]


def traded(net: nn.Module, **how: Any) -> Any:
    x, y = samples(1)
    bright = 0.4 + 0.2 * torch.rand(3, 1, 2, 3, generator=torch.manual_seed(7))
    got = trade_off(
        net,
        x,
        y,
        lambda *_: None,
        lambda _: 0.5,
        defenses=["eigen-waterfill"],
        budgets=[0.3],
        mixup=[0.7],
        partners=(bright, torch.arange(3)),
        attack=FAST.changed(steps=6),
        steps=6,
        start="near",
        **how,
    )
    assert {c.status.word for c in got.cells} == {"ok"}
    return [
        (a.gradient_norm, a.delta_norm, o.psnr, o.predicted)
        for cell in got.cells
        for a in cell.attacked
        for o in a.outcomes.values()
    ]


def _update() -> leakwatch.WeightUpdate:
    """Of two clients with two samples each, who trained on prepared samples."""
    how = leakwatch.LocalTraining(epochs=2, batch_size=2, lr=0.3)
    x, y = samples(4)
    w = nn.utils.parameters_to_vector(network().parameters()).detach()
    final = []
    for part in ([0, 1], [2, 3]):
        net = network()
        sgd = torch.optim.SGD(net.parameters(), lr=how.lr)
        for _ in range(how.epochs):
            sgd.zero_grad()
            nn.functional.cross_entropy(net(Normalise()(x[part])), y[part]).backward()
            sgd.step()
        final.append(nn.utils.parameters_to_vector(net.parameters()).detach())
    labels = y.view(2, 2).sort(1).values
    shape = tuple(x.shape[1:])
    return leakwatch.WeightUpdate(w, torch.stack(final), labels, shape, 2, how)


def updates_attacked(net: nn.Module, **how: Any) -> Any:
    known = _update()
    return [
        (got.images, got.loss, got.alpha, got.labels)
        for update in (known, replace(known, labels=None))
        for preset in ("sme", "ig-update", "dlfa")
        for got in [
            leakwatch.attack_update(
                net, update, preset, steps=6, dtype=torch.float64, **how
            )
        ]
    ]


def updates_scored(net: nn.Module, **how: Any) -> Any:
    x, y = samples(4)
    got = leakwatch.score_update(
        net, x.view(2, 2, *x.shape[1:]), y.view(2, 2), _update(), dtype=torch.float64,
        **how,
    )  # fmt: skip
    return [got[name] for name in ("lavp_l2_max", "i2f", "joint_i2f_bayes_psnr")], (
        got.alpha, got.similarity, got.mismatch
    )  # fmt: skip


STUDIES = [recommended, unequal, compared, traded, updates_attacked, updates_scored]


@pytest.mark.parametrize("study", STUDIES)
def test_a_preparation_is_part_of_the_network(study: Callable[..., Any]) -> None:
    expected = study(inside())
    close(study(network(), prepare=Normalise()), expected)
    with pytest.raises(AssertionError):  # the oracle notices when it is missing
        close(study(network()), expected)


@pytest.mark.parametrize("study", STUDIES)
def test_a_preparation_is_a_function(study: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="prepare must be a function prepare"):
        study(network(), prepare="normalise")
