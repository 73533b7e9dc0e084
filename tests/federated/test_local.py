"""A client's training against a plain loop with torch.optim.SGD."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from leakwatch import GradientMap, cross_entropy
from leakwatch.federated import (
    LocalTraining,
    client_updates,
    segment_similarity,
    train_client,
)
from leakwatch.federated.streams import client_stream

from .problems import CLASSES, cnn, normalised, samples

HOW = LocalTraining(epochs=3, batch_size=4, lr=0.2)
PLAIN = {"dtype": torch.float64}


def flat(net: nn.Module) -> Tensor:
    kept = [p.detach().reshape(-1) for p in net.parameters() if p.requires_grad]
    return torch.cat(kept)


def loop(
    net: nn.Module, x: Tensor, y: Tensor, how: LocalTraining, *, client: int = 0
) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """What a person would write; the modes are those of ``net``."""
    net = copy.deepcopy(net)
    optimizer = torch.optim.SGD(
        net.parameters(), how.lr, how.momentum, weight_decay=how.weight_decay
    )
    shuffle = client_stream(0, 0, client)
    losses, points = [], []
    for _ in range(how.epochs):
        order = torch.randperm(len(x), generator=shuffle)
        for start in range(0, len(x), how.batch_size):
            batch = order[start : start + how.batch_size]
            points.append(flat(net))
            optimizer.zero_grad()
            loss = cross_entropy(net(x[batch]), y[batch]).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return net, losses, points


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "how",
    [
        HOW,
        LocalTraining(epochs=2, batch_size=100, lr=0.1),
        LocalTraining(2, 3, 0.1, momentum=0.9, weight_decay=0.01),
    ],
)
@pytest.mark.parametrize("make", [cnn, normalised])
def test_equals_a_plain_loop_to_the_last_bit(make: Any, how: LocalTraining) -> None:
    net = make().eval()
    x, y = samples(10)
    expected, losses, _ = loop(net, x, y, how)
    found = train_client(net, x, y, how)
    assert_equal(found.initial, flat(net))
    assert_equal(found.final, flat(expected))
    assert_equal(found.losses, torch.stack(losses))
    assert found.steps == how.steps(10) == len(losses)


def test_the_default_criterion_is_cross_entropy() -> None:
    net = cnn()
    x, y = samples(10)

    def plain(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(module(x), y, reduction="none")

    one, two = (
        train_client(net, x, y, HOW),
        train_client(net, x, y, HOW, criterion=plain),
    )
    torch.testing.assert_close(one.final, two.final, rtol=1e-12, atol=1e-13)


def test_frozen_statistics_stay_and_others_are_those_of_training() -> None:
    net = normalised()
    x, y = samples(10)
    before = net[1].running_mean.clone()
    kept = train_client(net, x, y, HOW)
    assert_equal(kept.buffers, dict(net.named_buffers()))
    moved = train_client(net, x, y, HOW, freeze_batchnorm=False)
    expected, _, _ = loop(net.train(), x, y, HOW)
    assert_equal(moved.final, flat(expected))
    assert_equal(moved.buffers, dict(expected.named_buffers()))
    assert int(moved.buffers["1.num_batches_tracked"]) == 9
    assert_equal(net[1].running_mean, before)


def test_unused_and_frozen_parameters_are_as_in_a_plain_loop() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(2, 2)
            self.fixed = nn.Linear(36, 8)
            self.head = nn.Linear(8, CLASSES)
            self.fixed.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.fixed(x.flatten(1)).tanh())

    torch.manual_seed(0)
    net = Net().double()
    x, y = samples(7)
    how = LocalTraining(2, 3, 0.1, momentum=0.5, weight_decay=0.1)
    expected, _, _ = loop(net, x, y, how)
    found = train_client(net, x, y, how, record="steps")
    assert_equal(found.final, flat(expected))
    assert found.recorded is not None
    assert found.recorded[:, :6].count_nonzero() == 0


def test_records_are_gradients_and_weights_of_every_step() -> None:
    net = cnn()
    x, y = samples(10)
    found = {
        kind: train_client(net, x, y, HOW, record=kind)
        for kind in ("steps", "full", "weights")
    }
    steps, full, weights = (found[kind].recorded for kind in found)
    _, _, points = loop(net, x, y, HOW)
    assert_equal(weights, torch.stack(points))
    # Plain SGD: every step is −lr times its gradient.
    after = torch.cat([weights[1:], found["steps"].final[None]])
    torch.testing.assert_close(
        steps, (weights - after) / HOW.lr, rtol=1e-10, atol=1e-12
    )
    for t in (0, 4, 8):
        moved = copy.deepcopy(net)
        torch.nn.utils.vector_to_parameters(weights[t], moved.parameters())
        expected = GradientMap(moved, **PLAIN)(x, y).mean(0)
        torch.testing.assert_close(full[t], expected, rtol=1e-10, atol=1e-12)
    assert_equal(found["full"].final, found["weights"].final)


def test_records_do_not_move_batchnorm() -> None:
    net = normalised()
    x, y = samples(10)
    plain = train_client(net, x, y, HOW, freeze_batchnorm=False)
    recorded = train_client(net, x, y, HOW, freeze_batchnorm=False, record="full")
    assert_equal(recorded.final, plain.final)
    assert_equal(recorded.buffers, plain.buffers)


class Checkpointed(nn.Module):
    def __init__(self, on: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, CLASSES)
        self.on = on
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if not self.on:
            return self.head(self.body(x).tanh())
        return self.head(checkpoint(self.body, x, use_reentrant=False).tanh())


def test_checkpointed_layers_run_again_at_the_same_weights() -> None:
    x, y = samples(10)
    plain, checked = (
        train_client(Checkpointed(on), x, y, HOW, record="full") for on in (False, True)
    )
    assert_equal(checked.final, plain.final)
    assert_equal(checked.recorded, plain.recorded)
    assert not torch.equal(plain.final, plain.initial)
    found = [segment_similarity(Checkpointed(on), plain) for on in (False, True)]
    assert_equal(found[1].similarity, found[0].similarity)


@pytest.mark.parametrize("record", ["steps", "full", "weights"])
def test_records_do_not_move_dropout(record: Any) -> None:
    net = nn.Sequential(cnn(), nn.Dropout(0.5), nn.Linear(3, 3).double())
    x, y = samples(10)
    plain = train_client(net, x, y, HOW)
    recorded = train_client(net, x, y, HOW, record=record)
    assert_equal(recorded.final, plain.final)
    assert_equal(recorded.losses, plain.losses)
    # Its own rows are the same each time.
    again = train_client(net, x, y, HOW, record=record)
    assert_equal(again.recorded, recorded.recorded)


def test_buffers_that_nobody_writes_keep_their_bits() -> None:
    net = normalised().float()
    net.register_buffer("third", torch.tensor([1 / 3, math.nan], dtype=torch.float64))
    net.register_buffer("phase", torch.tensor([1 / 3 + 1j], dtype=torch.complex128))
    # Sequential runs its children only, so that nothing reads these two.
    before = {k: v.clone() for k, v in net.named_buffers()}
    x, y = samples(10)
    found = train_client(net, x, y, HOW, freeze_batchnorm=False).buffers
    for name in ("third", "phase"):
        torch.testing.assert_close(
            found[name], before[name], rtol=0, atol=0, equal_nan=True
        )
    assert not torch.equal(found["1.running_mean"], before["1.running_mean"])


def test_nothing_outside_matters_and_nothing_outside_is_touched() -> None:
    net = nn.Sequential(cnn(), nn.Dropout(0.5), nn.Linear(3, 3).double()).eval()
    net[0].train()
    x, y = samples(10)
    modes = [m.training for m in net.modules()]
    before = {k: v.clone() for k, v in net.state_dict().items()}
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = train_client(net, x, y, HOW, client=2)
    assert_equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    with torch.inference_mode():
        two = train_client(net, x, y, HOW, client=2)
    assert_equal(two.final, one.final)
    other = train_client(net, x, y, HOW, client=3)
    assert not torch.equal(other.final, one.final)
    assert not torch.equal(
        train_client(net, x, y, HOW, client=2, round=1).final, one.final
    )
    assert [m.training for m in net.modules()] == modes
    assert_equal(net.state_dict(), before)
    assert all(p.grad is None for p in net.parameters())
    # Dropout is on: without it the same shuffling ends elsewhere.
    net[1].p = 0.0
    assert not torch.equal(train_client(net, x, y, HOW, client=2).final, one.final)


def test_precision_is_that_of_the_parameters_unless_asked() -> None:
    x, y = samples(6)
    half = cnn().bfloat16()
    assert train_client(half, x, y, HOW).final.dtype == torch.float32
    assert train_client(cnn().float(), x, y, HOW).final.dtype == torch.float32
    exact = train_client(cnn().float(), x, y, HOW, dtype=torch.float64)
    near = train_client(cnn().float(), x.float(), y, HOW)
    torch.testing.assert_close(near.final.double(), exact.final, rtol=1e-5, atol=1e-6)


def test_clients_in_groups_of_equal_size() -> None:
    net, (x, y) = cnn(), samples(12)
    sizes = (5, 3, 5, 4)
    sent = [
        train_client(net, x[:n], y[:n], HOW, client=10 + i) for i, n in enumerate(sizes)
    ]
    groups = client_updates(sent)
    assert [(g.samples, g.index) for g in groups] == [
        (5, (10, 12)),
        (3, (11,)),
        (4, (13,)),
    ]
    assert_equal(
        groups[0].difference, flat(net) - torch.stack([sent[0].final, sent[2].final])
    )
    assert_equal(groups[0].labels, y[:5].sort().values.expand(2, 5))
    assert groups[0].training == HOW
    assert groups[0].sample_shape == (1, 6, 6)
    unknown = client_updates(sent, labels=False, training=False)[0]
    assert (unknown.labels, unknown.training) == (None, None)
    elsewhere = train_client(cnn(1), x, y, HOW)
    with pytest.raises(ValueError, match="client 0 started from another network"):
        client_updates([*sent, elsewhere])
    with pytest.raises(ValueError, match="at least one"):
        client_updates([])


def test_divergence_is_an_outcome() -> None:
    x, y = samples(6)
    far = LocalTraining(epochs=60, batch_size=2, lr=1e200)
    update = train_client(cnn(), x, y, far)
    assert update.diverged
    assert not train_client(cnn(), x, y, HOW).diverged
    with pytest.raises(ValueError, match="diverged"):
        client_updates([update])


def test_what_cannot_work_is_said_early() -> None:
    x, y = samples(6)
    with pytest.raises(ValueError, match="record must be one of 'steps'"):
        train_client(cnn(), x, y, HOW, record="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_memory"):
        train_client(cnn(), x, y, HOW, record="steps", max_memory=1e-3)
    with pytest.raises(ValueError, match="one label per sample"):
        train_client(cnn(), x, y[:3], HOW)
    with pytest.raises(ValueError, match="at least 0"):
        train_client(cnn(), x, y, HOW, client=-1)
    with pytest.raises(ValueError, match="no parameter"):
        train_client(cnn().requires_grad_(False), x, y, HOW)


def test_a_sample_at_fault_is_named() -> None:
    x, y = samples(10)
    for wrong in (7, -1, CLASSES):
        labels = y.clone()
        labels[6] = wrong
        text = (
            rf"sample 6 of client 4, with label {wrong}, has loss nan.*\[0, classes\)"
        )
        with pytest.raises(ValueError, match=text):
            train_client(cnn(), x, labels, HOW, client=4)
    for value in (math.nan, math.inf):
        inputs = x.clone()
        inputs[3, 0, 1, 1] = value
        with pytest.raises(ValueError, match="sample 3 of client 4 holds NaN"):
            train_client(cnn(), inputs, y, HOW, client=4)


def test_a_single_sample_for_batchnorm_names_the_client() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8)).double()
    x, y = samples(5)
    text = "client 2 has a batch of 1 sample.*freeze_batchnorm=True"
    with pytest.raises(ValueError, match=text):
        train_client(net, x, y, HOW, client=2, freeze_batchnorm=False)
    assert not train_client(net, x, y, HOW, client=2).diverged


def test_numbers_may_be_those_of_numpy() -> None:
    x, y = samples(6)
    how = LocalTraining(epochs=np.int64(2), batch_size=np.int64(4), lr=0.1)
    same = LocalTraining(epochs=2, batch_size=4, lr=0.1)
    found = train_client(cnn(), x, y, how, client=np.int64(1))
    assert_equal(found.final, train_client(cnn(), x, y, same, client=1).final)
    with pytest.raises(TypeError, match="training must be a LocalTraining"):
        train_client(cnn(), x, y, {"epochs": 1})  # type: ignore[arg-type]
