"""Rounds of federated averaging against what the algorithm says."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from leakwatch import cross_entropy
from leakwatch.federated import (
    FederatedAveraging,
    LocalTraining,
    answering_clients,
    average_updates,
    train_client,
)

from .problems import cnn, normalised, samples

HOW = LocalTraining(epochs=2, batch_size=3, lr=0.1, momentum=0.5)
SIZES = (4, 7, 5, 9, 3, 6)


def clients() -> list[tuple[Tensor, Tensor]]:
    return [samples(n, seed=i) for i, n in enumerate(SIZES)]


def server(net: Any = None, **kwargs: Any) -> FederatedAveraging:
    return FederatedAveraging(
        cnn() if net is None else net, clients(), HOW, **{"seed": 1, **kwargs}
    )


def flat(net: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_round_is_the_weighted_average_of_its_clients() -> None:
    net = cnn()
    simulation = server(net, share=0.5)
    for number in range(2):
        start = copy.deepcopy(net)
        found = simulation.step()
        chosen = answering_clients(6, 0.5, round=number, seed=1)
        assert [u.client for u in found.updates] == list(chosen)
        total = torch.zeros_like(flat(start))
        for client in chosen:
            x, y = clients()[client]
            own = train_client(start, x, y, HOW, client=client, round=number, seed=1)
            total += own.final * SIZES[client]
        expected = total / sum(SIZES[client] for client in chosen)
        torch.testing.assert_close(flat(net), expected, rtol=1e-14, atol=1e-15)
        assert_equal(found.weights, flat(net))
        losses = [float(u.losses.mean()) * u.samples for u in found.updates]
        assert found.loss == pytest.approx(
            sum(losses) / sum(u.samples for u in found.updates)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_client_is_its_own_average(dtype: torch.dtype) -> None:
    net = normalised().to(dtype)
    x, y = samples(7)
    update = train_client(net, x, y, HOW, freeze_batchnorm=False)
    weights, buffers = average_updates([update])
    assert_equal(weights, update.final)
    assert_equal(buffers, update.buffers)


def test_one_full_batch_step_of_everyone_is_a_step_on_all_samples() -> None:
    net = cnn()
    x = torch.cat([x for x, _ in clients()])
    y = torch.cat([y for _, y in clients()])
    how = LocalTraining(epochs=1, batch_size=100, lr=0.1)
    expected = train_client(net, x, y, how).final
    FederatedAveraging(net, clients(), how).step()
    torch.testing.assert_close(flat(net), expected, rtol=1e-13, atol=1e-14)


def test_buffers_are_averaged_or_kept() -> None:
    nets = normalised(), normalised()
    before = {k: v.clone() for k, v in nets[0].named_buffers()}
    found = server(nets[0], freeze_batchnorm=False).step()
    server(nets[1], freeze_batchnorm=False, buffers="kept").step()
    assert_equal(flat(nets[0]), flat(nets[1]))
    assert_equal(dict(nets[1].named_buffers()), before)
    means = torch.stack([u.buffers["1.running_mean"] for u in found.updates])
    sizes = torch.tensor([u.samples for u in found.updates], dtype=torch.float64)
    torch.testing.assert_close(
        nets[0][1].running_mean, sizes @ means / sizes.sum(), rtol=1e-13, atol=1e-15
    )
    steps = [HOW.steps(n) for n in SIZES]
    mean = sum(n * t for n, t in zip(SIZES, steps, strict=True)) / sum(SIZES)
    assert int(nets[0][1].num_batches_tracked) == round(mean)


def test_resumed_equals_uninterrupted() -> None:
    net = normalised()
    simulation = server(net, share=0.5, freeze_batchnorm=False)
    list(simulation.run(4))

    first = server(normalised(), share=0.5, freeze_batchnorm=False)
    list(first.run(2))
    state = first.state_dict()
    list(first.run(1))
    torch.manual_seed(7)
    second = server(normalised(3), share=0.5, freeze_batchnorm=False)
    second.load_state_dict(state)
    list(second.run(2))
    assert second.completed == 4
    assert_equal(second.module.state_dict(), net.state_dict())
    with pytest.raises(ValueError, match="seed=1"):
        server(seed=2).load_state_dict(state)


class Constants(nn.Module):
    """Buffers that no forward changes, of types that float64 doesn't hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(36, 3)
        self.register_buffer("large", torch.tensor([2**62 + 1, 2**63 - 1]))
        self.register_buffer("phase", torch.tensor([1 / 3 + 2j]))
        self.register_buffer("third", torch.tensor([1 / 3], dtype=torch.float64))
        self.register_buffer("odd", torch.tensor([-math.inf, math.nan]))
        self.register_buffer("flag", torch.tensor(True))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1))


def test_constant_buffers_keep_their_bits() -> None:
    net = Constants()
    before = {k: v.clone() for k, v in net.named_buffers()}
    server(net).step()
    for name, buffer in net.named_buffers():
        torch.testing.assert_close(buffer, before[name], rtol=0, atol=0, equal_nan=True)


def test_buffers_that_differ_are_averaged_in_wide_arithmetic() -> None:
    x, y = samples(4)
    sent = [train_client(cnn(), x[:n], y[:n], HOW) for n in (3, 1)]
    values: dict[str, tuple[Any, Any]] = {
        "large": ([2**62 + 1, 7], [2**62 + 5, 7]),
        "phase": ([1 + 2j], [5 - 2j]),
        "flag": ([True, False], [False, True]),
    }
    pair = [
        replace(update, buffers={k: torch.tensor(v[i]) for k, v in values.items()})
        for i, update in enumerate(sent)
    ]
    found = average_updates(pair)[1]
    assert found["large"].tolist() == [2**62 + 2, 7]
    assert_equal(found["phase"], torch.tensor([2 + 1j]))
    assert found["flag"].tolist() == [True, False]


def sent(net: nn.Module, *numbers: int) -> list[Any]:
    x, y = samples(4)
    return [train_client(net, x, y, HOW, client=i) for i in numbers]


def test_updates_of_different_networks_are_not_averaged() -> None:
    net, moved = cnn(), cnn()
    with torch.no_grad():
        moved[-1].bias[:2] += 0.25
    text = (
        r"clients 7, 9 started from another network than client 3, client 7 in 2 of "
        r"[\d,]+ entries of the weights, by up to 0\.25; pass the updates of one round"
    )
    with pytest.raises(ValueError, match=text):
        average_updates([*sent(net, 3, 4), *sent(moved, 7, 9)])
    wider = replace(sent(net, 7)[0], initial=torch.zeros(5))
    with pytest.raises(ValueError, match=r"in the shape of the weights, \(5,\) and"):
        average_updates([*sent(net, 3), wider])


def test_updates_from_different_buffers_are_not_averaged() -> None:
    net, moved = normalised(), normalised()
    moved[1].running_mean[1] += 0.5
    text = r"client 2 in 1 of 4 entries of buffer '1\.running_mean', by up to 0\.5;"
    with pytest.raises(ValueError, match=text):
        average_updates([*sent(net, 1), *sent(moved, 2)])
    first, second = sent(net, 1, 2)
    with pytest.raises(ValueError, match="in lacking buffer '1"):
        average_updates([first, replace(second, initial_buffers={})])
    with pytest.raises(ValueError, match="in having buffer '1"):
        average_updates([replace(first, initial_buffers={}), second])
    with pytest.raises(ValueError, match=r"client 2 sent 1 weights, but started from"):
        average_updates([first, replace(second, final=second.final[:1])])
    lost = {k: b for k, b in second.buffers.items() if k != "1.running_mean"}
    with pytest.raises(ValueError, match=r"client 2 sent no buffer '1\.running_mean'"):
        average_updates([first, replace(second, buffers=lost)])


class Tempered(nn.Module):
    """A criterion with a parameter that clients train."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.scale * module(x), y)


def test_a_trained_criterion_is_resumed_too() -> None:
    whole, first, second = (server(cnn(), criterion=Tempered()) for _ in range(3))
    list(whole.run(3))
    list(first.run(2))
    second.load_state_dict(first.state_dict())
    second.step()
    assert float(whole.criterion.scale.detach()) != 1
    assert_equal(second.criterion.state_dict(), whole.criterion.state_dict())
    assert_equal(flat(second.module), flat(whole.module))
    state = first.state_dict()
    del state["criterion"]
    with pytest.raises(ValueError, match="the state lacks 'criterion'"):
        second.load_state_dict(state)


def test_coarse_weights_are_refused() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(ValueError, match=r"0\.weight is torch.*module\.float\(\)"):
            server(cnn().to(dtype))


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"a": samples(3)}, TypeError, "sequence of .*got a dict"),
        (None, TypeError, "sequence of .*got a NoneType"),
        ([samples(3), samples(3)[0]], TypeError, r"client 1 must be a pair"),
        ([samples(3), (samples(3)[0][:0],) * 2], ValueError, "client 1: one label"),
        ([(samples(3)[0], samples(4)[1])], ValueError, "client 0: one label"),
        ([([1.0], [1])], TypeError, "client 0: inputs must be a tensor"),
    ],
)
def test_malformed_clients_are_named(
    given: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        FederatedAveraging(cnn(), given, HOW)


def test_clients_that_are_loaded_are_looked_at_when_they_train() -> None:
    class Loaded:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            x, y = samples(3)
            return x, y[: 3 - index]

    simulation = FederatedAveraging(cnn(), Loaded(), HOW)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="client 1: one label"):
        simulation.step()


def test_wrong_calls_are_refused_before_a_round() -> None:
    simulation = server()
    with pytest.raises(ValueError, match="rounds must be at least 0, got -1"):
        simulation.run(-1)
    with pytest.raises(TypeError, match="rounds must be an integer"):
        simulation.run(1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lacks 'module', 'completed', 'seed'"):
        simulation.load_state_dict({})
    with pytest.raises(TypeError, match="training must be a LocalTraining"):
        FederatedAveraging(cnn(), clients(), None)  # type: ignore[arg-type]
    for share in ("x", None, True):
        with pytest.raises(TypeError, match="share must be a number"):
            answering_clients(3, share)  # type: ignore[arg-type]
    for count in (2.5, True, "a"):
        with pytest.raises(TypeError, match="clients must be an integer"):
            answering_clients(count)  # type: ignore[arg-type]
    assert answering_clients(np.int64(3), np.float64(1)) == (0, 1, 2)
    assert len(list(simulation.run(np.int64(1)))) == 1


def test_rounds_train() -> None:
    bright = [(x.clone(), y) for x, y in clients()]
    for x, y in bright:
        for image, label in zip(x, y, strict=True):
            image[:, 2 * label : 2 * label + 2] += 1
    simulation = FederatedAveraging(cnn(), bright, HOW)
    losses = [found.loss for found in simulation.run(12)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(("share", "count"), [(1.0, 40), (0.1, 4), (0.01, 1)])
def test_a_share_answers(share: float, count: int) -> None:
    for number in range(5):
        found = answering_clients(40, share, round=number)
        assert len(set(found)) == len(found) == count
        assert list(found) == sorted(found)
        assert 0 <= found[0] <= found[-1] < 40


def test_everybody_answers_as_often() -> None:
    for how in ("count", "chance"):
        counts = torch.zeros(20)
        sizes = []
        for number in range(500):
            found = answering_clients(20, 0.3, answering=how, round=number)
            counts[list(found)] += 1
            sizes.append(float(len(found)))
        # Binomial, 500 draws of 0.3: six standard deviations.
        torch.testing.assert_close(counts, torch.full((20,), 150.0), rtol=0, atol=61)
        spread = float(torch.tensor(sizes).std())
        expected = 0.0 if how == "count" else (20 * 0.3 * 0.7) ** 0.5
        assert spread == pytest.approx(expected, rel=0.15)
    assert len(answering_clients(20, 1e-9, answering="chance")) == 1


def test_a_diverged_client_stops_the_round_and_leaves_the_server() -> None:
    net = cnn()
    before = flat(net)
    how = LocalTraining(epochs=60, batch_size=2, lr=1e200)
    simulation = FederatedAveraging(net, clients(), how)
    with pytest.raises(ValueError, match=r"client 0 diverged in round 0.*lr=1e"):
        simulation.step()
    assert_equal(flat(net), before)
    assert simulation.completed == 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"share": 0.0}, "share must lie in"),
        ({"share": 1.5}, "share must lie in"),
        ({"answering": "all"}, "answering must be one of 'count', 'chance'"),
        ({"buffers": "lost"}, "buffers must be one of 'averaged', 'kept'"),
        ({"seed": -1}, "at least 0"),
        ({"dtype": torch.float16}, "dtype must be"),
    ],
)
def test_errors(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        server(**changes)


def test_no_clients() -> None:
    with pytest.raises(ValueError, match="clients must be at least 1"):
        FederatedAveraging(cnn(), [], HOW)
    with pytest.raises(ValueError, match="nothing to average"):
        average_updates([])
