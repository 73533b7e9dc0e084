"""DLFA: its objective, priors and limits, in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakwatch import LocalTraining, WeightUpdate
from leakwatch.attacks import PixelScale, SimulationAttack, Start, attack_update
from leakwatch.attacks.matching.selection import opened
from leakwatch.attacks.updates.priors import (
    excess,
    joined,
    order_distance,
    squared_variation,
)
from leakwatch.attacks.updates.simulation import SimulationObjective, spread_labels
from leakwatch.attacks.updates.simulation_cost import SimulationCost
from leakwatch.derivatives import GradientMap
from leakwatch.quality import align

from ..update_problems import clients, cosine_distance, flat, small_cnn, update_of
from .test_local_steps import unrolled

HOW = LocalTraining(epochs=2, batch_size=2, lr=0.5)
PIXELS = PixelScale([0.4], [0.3])


def problem(count: int = 2, images: int = 3) -> tuple[nn.Module, WeightUpdate]:
    net = small_cnn()
    x, y = clients(count, images)
    return net, update_of(net, PIXELS.to_input(x), y, HOW)


def priors(x: Tensor) -> Tensor:
    """The published terms for one client, epoch after epoch, written out."""
    sets = x.view(2, -1, *x.shape[1:])
    tv = sum(
        ((image - image.roll(1, d)) ** 2).sum() for image in x for d in (1, 2)
    ) / len(x)
    p = x * 0.3 + 0.4
    clip = ((p - p.clamp(0, 1)) ** 2).sum() / len(x)
    means = [s.mean(0) for s in sets]
    order = sum(F.mse_loss(a, b) for a in means for b in means) / 4
    return 0.01 * tv + 3.0 * clip + 5.0 * order


@pytest.mark.parametrize("step", [0, 3, 8])
def test_the_objective_is_the_published_one(step: int) -> None:
    net, update = problem()
    assert update.labels is not None
    gradients = GradientMap(net, dtype=torch.float64)
    attack = SimulationAttack(steps=8, tv=0.01, clip=3.0, order=5.0, fit=(1.0, 16.0))
    torch.manual_seed(0)
    x = torch.randn(2, 6, 1, 6, 6, dtype=torch.float64)
    nothing = torch.full((2,), math.nan, dtype=torch.float64)
    rows = torch.tensor([1, 0])
    cost = attack.cost(gradients, update)
    with opened(gradients) as path_for:
        objective = SimulationObjective(
            attack, gradients, update, update.labels, path_for, PIXELS, cost
        )
        found = objective(x, nothing, rows, step)
    f = {0: 1.0, 3: 8.0, 8: 16.0}[step]
    weights, at = [], 0
    for layer, size in enumerate((8 * 9 + 8, 8 * 4 * 9 + 4, 36 * 3 + 3)):
        weights.append(torch.full((size,), math.exp(-layer), dtype=torch.float64))
        at += size
    assert at == flat(net).numel()
    for i, client in enumerate(rows.tolist()):
        leaf = x[i].clone().requires_grad_()
        final = unrolled(net, update.initial, leaf, update.labels[client], HOW, 2)
        moved, wanted = update.initial - final, update.difference[client]
        delta = (moved - wanted) / HOW.lr
        total = f * (torch.cat(weights) * delta**2).sum() / 3 + priors(leaf)
        (expected,) = torch.autograd.grad(total, leaf)
        close = {"rtol": 1e-9, "atol": 1e-12}
        torch.testing.assert_close(found.objective[i], total.detach() / f, **close)
        torch.testing.assert_close(found.gradient[i], expected, **close)
        d = cosine_distance(moved, wanted).detach()
        torch.testing.assert_close(found.distance[i], d, **close)
    assert found.slope is None


def test_images_that_explain_the_update_have_no_distance() -> None:
    net, update = problem(1, 2)
    x, _ = clients(1, 2)
    attack = SimulationAttack(steps=1, tv=0.0, every_epoch=False)
    found = attack.run(
        GradientMap(net, dtype=torch.float64),
        update,
        pixels=PIXELS,
        start=Start.normal(),
        initial=PIXELS.to_input(x)[None],
    )
    assert float(found.loss) < 1e-20
    assert found.status[0].word == "ok"
    assert math.isnan(float(found.alpha))


def test_sets_of_images_differ_by_what_stands_for_them() -> None:
    torch.manual_seed(0)
    x = torch.rand(2, 6, 3, 5, 5, dtype=torch.float64)
    order = [1, 0, 4, 3, 2, 5]
    turned = torch.cat([x[:, :3], x[:, :3][:, [2, 0, 1]]], 1)
    for kind in ("l2_mean", "l2_max_conv"):
        assert float(order_distance(x, 2, kind).min()) > 1e-3
        same = order_distance(x[:, order], 3, kind)
        torch.testing.assert_close(same[:1], order_distance(x[:1, order], 3, kind))
        assert float(order_distance(turned, 2, kind).abs().max()) < 1e-25
        assert order_distance(x, 1, kind).tolist() == [0.0, 0.0]


def test_images_beyond_their_range_cost_what_they_are_beyond() -> None:
    p = torch.tensor([[[-0.5, 0.5], [1.25, 2.0]]], dtype=torch.float64)
    p = p[:, :, None, None]
    x = PIXELS.to_input(p)
    assert float(excess(x, PIXELS)) == pytest.approx((0.25 + 0.0625 + 1) / 2)
    assert float(excess(x, PixelScale.unknown())) == 0
    with pytest.raises(ValueError, match="use tv=0"):
        squared_variation(torch.zeros(1, 2, 3))


def test_epochs_are_matched_within_a_class_and_averaged() -> None:
    torch.manual_seed(0)
    first = torch.rand(1, 4, 1, 3, 3, dtype=torch.float64)
    labels = torch.tensor([[0, 0, 1, 0]])
    second = first[:, [3, 0, 2, 1]] + 0.01
    # An image that looks like one of another class stays where its label is.
    second[0, 2] = first[0, 0]
    found = joined(torch.cat([first, second], 1), labels)
    expected = first + 0.005
    expected[0, 2] = (first[0, 2] + first[0, 0]) / 2
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(joined(first, labels), first, rtol=0, atol=0)


def test_every_batch_has_its_share_of_each_class() -> None:
    labels = torch.tensor([[2] * 4 + [0] * 4 + [1] * 2])
    found = spread_labels(labels, 4)
    assert found.sort(1).values.tolist() == labels.sort(1).values.tolist()
    counts = [b.bincount(minlength=3).tolist() for b in found[0].split(4)]
    assert counts == [[2, 0, 2], [1, 1, 2], [1, 1, 0]]


@pytest.mark.parametrize(("every_epoch", "error"), [(True, 1e-2), (False, 2e-3)])
def test_it_rebuilds_small_images(every_epoch: bool, error: float) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Sigmoid(), nn.Linear(12, 3))
    net = net.double()
    x, _ = clients(2, 2, (1, 4, 4))
    y = torch.tensor([[0, 2], [1, 0]])
    update = update_of(net, x, y, LocalTraining(epochs=3, batch_size=2, lr=0.5))
    found = attack_update(
        net,
        update,
        "dlfa",
        steps=200,
        lr=0.3,
        decay=0.95,
        order=1.0,
        tv=0.0,
        every_epoch=every_epoch,
        data_range=1.0,
        dtype=torch.float64,
    )
    assert found.images.shape == x.shape
    assert float((align(found.images, x) - x).square().mean()) < error


def test_a_client_does_not_feel_the_others() -> None:
    net, update = problem(3)
    given = {"steps": 5, "restarts": 2, "dtype": torch.float64, "data_range": 1.0}
    together = attack_update(net, update, "dlfa", **given)  # type: ignore[arg-type]
    assert update.labels is not None
    alone = replace(
        update, final=update.final[2:], labels=update.labels[2:], index=(2,)
    )
    found = attack_update(net, alone, "dlfa", **given)  # type: ignore[arg-type]
    close = {"rtol": 1e-8, "atol": 1e-10}
    torch.testing.assert_close(found.images[0], together.images[2], **close)
    torch.testing.assert_close(found.loss[0], together.loss[2], **close)


def test_too_much_is_refused_before_it_starts() -> None:
    net, update = problem()
    with pytest.raises(ValueError, match=r"T=4 local steps takes about .* MiB"):
        attack_update(net, update, "dlfa", memory_limit=1000.0)
    with pytest.raises(ValueError, match=r"T=4 local steps would take about"):
        attack_update(net, update, "dlfa", most_seconds=1e-6)
    with pytest.raises(ValueError, match="so it must know them: give the update"):
        attack_update(net, replace(update, training=None), "dlfa")


def test_the_estimate_grows_with_the_steps() -> None:
    net, update = problem()
    assert update.training is not None
    gradients, attack = GradientMap(net, dtype=torch.float64), SimulationAttack()
    few = attack.cost(gradients, update)
    longer = replace(update, training=replace(update.training, epochs=200))
    many = attack.cost(gradients, longer)
    assert (few.steps, many.steps) == (4, 400)
    assert many.seconds > 10 * few.seconds
    tight = attack.changed(memory_limit=many.bytes / 20).cost(gradients, longer)
    assert tight.segment < 400
    assert tight.bytes < many.bytes / 4


def test_costs_say_what_to_do() -> None:
    cost = SimulationCost(steps=50, chunk=8, segment=7, bytes=2**30, seconds=1e4)
    cost.check(2**30, 1e4)
    with pytest.raises(ValueError, match=r"1\.02e\+03 MiB .* use 'sme'"):
        cost.check(2**29, None)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tv": -1.0}, "tv must be at least 0 and finite"),
        ({"order": math.nan}, "order must be at least 0 and finite"),
        ({"decay": 0.0}, r"decay must lie in \(0, inf\]"),
        ({"memory_limit": -1.0}, r"memory_limit must lie in \(0, inf\]"),
        ({"fit": (0.0, 1.0)}, "fit must be two positive numbers"),
        ({"order_prior": "l1"}, "one of 'l2_mean', 'l2_max_conv'"),
        ({"path": "fast"}, "path must be"),
        ({"steps": 0}, "steps must be at least 1"),
    ],
)
def test_impossible_settings_are_refused(change: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SimulationAttack(**change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown setting beta"):
        SimulationAttack().changed(beta=1)


def test_epochs_of_one_batch_share_their_images() -> None:
    attack, how = SimulationAttack(), LocalTraining(epochs=5, batch_size=4, lr=0.1)
    assert attack.sets(how, samples=4) == 1
    assert attack.sets(how, samples=5) == 5
    assert attack.changed(every_epoch=True).sets(how, samples=4) == 5
    assert attack.changed(every_epoch=False).sets(how, samples=5) == 1
