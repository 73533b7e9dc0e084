"""Moved images have the budget in truth, on networks where it fails to first order."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from leakwatch.defenses import (
    Budget,
    EigenNoise,
    InputSpace,
    InRange,
    Samples,
    Shared,
    Waterfill,
)
from leakwatch.defenses.covariance import standard
from leakwatch.defenses.eigen.input_space import MOST_TRIES, TOLERANCE, _Search
from leakwatch.derivatives import GradientMap

SIZE, BOX = 16, 0.5
KINDS = ("large", "trained")


def network(kind: str) -> nn.Module:
    """Of large weights; or confident of the labels of :func:`private`."""
    torch.manual_seed(0)
    middle = nn.ReLU() if kind == "kinks" else nn.Sigmoid()
    net = nn.Sequential(nn.Linear(SIZE, 12), middle, nn.Linear(12, 4)).double()
    if kind == "large":
        for p in net.parameters():
            p.data.mul_(6.0)
    if kind == "trained":
        x, y = private()
        adam = torch.optim.Adam(net.parameters(), 0.05)
        for _ in range(150):
            adam.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            adam.step()
    return net


def private() -> tuple[Tensor, Tensor]:
    x = torch.rand(3, SIZE, generator=torch.Generator().manual_seed(1))
    return x.double(), torch.tensor([0, 2, 3])


def samples_of(net: nn.Module, dtype: torch.dtype = torch.float64) -> Samples:
    x, y = private()
    return Samples(GradientMap(net, dtype=dtype), x.to(dtype), y)


def protected(
    samples: Samples,
    budget: Budget,
    seed: int = 0,
    coefficients: str = "gaussian",
    box: float = BOX,
) -> Shared:
    noise = EigenNoise(budget, InputSpace(box), coefficients)  # type: ignore[arg-type]
    stream = torch.Generator().manual_seed(seed)
    return noise.protect(samples.gradient, generator=stream, samples=samples)


def displacement(shared: Shared, samples: Samples, seed: int = 0) -> Tensor:
    """a of each, from what is known of the directions and the draw."""
    known = shared.knowledge.covariance
    assert isinstance(known, InRange)
    xi = standard(len(samples), SIZE, torch.Generator().manual_seed(seed), "gaussian")
    lam = samples.basis.eigenvalues
    c = torch.where(known.variance > 0, xi * (known.variance / lam).sqrt(), 0.0)
    return torch.einsum("nij,nj->ni", samples.basis.directions, c)


def dense_gradient(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(net(x[None]), y[None])
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, net.parameters())])


def dense_jacobian(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    def graph(moved: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(net(moved[None]), y[None])
        parts = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        return torch.cat([g.flatten() for g in parts])

    found: Tensor = torch.autograd.functional.jacobian(graph, x)
    return found


# -- one sample in each message --------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("relative", [1e-6, 0.1, 0.7])
def test_the_gradient_moves_by_the_budget_in_every_draw(
    kind: str, relative: float
) -> None:
    net, (x, y) = network(kind), private()
    samples = samples_of(net)
    for seed in range(3):
        made = protected(samples, Budget(relative), seed, box=3.0)
        a = displacement(made, samples, seed)
        for i in range(3):
            g = dense_gradient(net, x[i], y[i])
            moved = dense_gradient(net, x[i] + a[i], y[i])
            torch.testing.assert_close(made.gradient[i], moved, rtol=1e-9, atol=1e-12)
            size = float((moved - g).norm())
            assert size == pytest.approx(relative * float(g.norm()), rel=TOLERANCE)
            assert float(made.variance[i]) == pytest.approx(size**2, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_to_first_order_the_budget_would_not_hold(kind: str) -> None:
    net, (x, y) = network(kind), private()
    samples = samples_of(net)
    asked = 0.7 * samples.gradient.norm(dim=1)
    linear = InputSpace(BOX).covariance(samples, asked.square())
    off = linear.draw(torch.Generator().manual_seed(0), "sign").norm(dim=1) / asked
    assert float((off - 1).abs().max()) > 0.3
    made = protected(samples, Budget(0.7), coefficients="sign")
    known = made.knowledge.covariance
    assert isinstance(known, InRange)
    # What is known is the covariance of J a, for what was really moved.
    xi = standard(3, SIZE, torch.Generator().manual_seed(0), "sign")
    a = torch.einsum(
        "nij,nj->ni",
        samples.basis.directions,
        xi * known.variance.sqrt() / samples.basis.eigenvalues.sqrt(),
    )
    for i in range(3):
        linear_size = (dense_jacobian(net, x[i], y[i]) @ a[i]).square().sum()
        torch.testing.assert_close(known.total[i], linear_size, rtol=1e-6, atol=0.0)


def test_the_cheapest_directions_move_by_the_box_and_one_by_less() -> None:
    samples = samples_of(network("trained"))
    made = protected(samples, Budget(0.3))
    known = made.knowledge.covariance
    assert isinstance(known, InRange)
    assert not known.exact
    along = (known.variance / samples.basis.eigenvalues).sqrt()
    for row in along.tolist():
        hidden = [s for s in row if s > 0]
        assert 1 < len(hidden) < SIZE
        assert row[-len(hidden) :] == hidden
        assert hidden[1:] == pytest.approx([BOX] * (len(hidden) - 1), rel=1e-9)
        assert hidden[0] <= BOX * (1 + 1e-9)


def test_what_all_directions_do_not_cost_is_not_spent() -> None:
    samples = samples_of(network("trained"))
    made = protected(samples, Budget(1e4))
    everything = Waterfill(BOX).covariance(samples, torch.full((3,), 1e9).double())
    known = made.knowledge.covariance
    assert isinstance(known, InRange)
    torch.testing.assert_close(known.variance, everything.variance)
    moved = displacement(made, samples)
    at = samples.gradients(samples.x + moved, samples.y)
    expected = (at - samples.gradient).square().sum(1)
    torch.testing.assert_close(made.variance, expected, rtol=1e-9, atol=0.0)
    asked = (1e4 * samples.gradient.norm(dim=1)).square()
    assert bool((made.variance < 0.5 * asked).all())


def test_a_tiny_budget_is_spent_to_first_order() -> None:
    net = network("large")
    samples = samples_of(net)
    made = protected(samples, Budget(1e-7), coefficients="sign")
    known = made.knowledge.covariance
    assert isinstance(known, InRange)
    torch.testing.assert_close(made.variance, known.total, rtol=3e-3, atol=0.0)


def test_no_budget_moves_nothing() -> None:
    samples = samples_of(network("large"))
    made = protected(samples, Budget(0.0))
    assert torch.equal(made.gradient, samples.gradient)
    assert made.variance.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("budget", [Budget(0.5), Budget(0.5, "norm")])
def test_a_sample_without_gradient_has_nothing_to_move(budget: Budget) -> None:
    net = network("trained")
    with torch.no_grad():
        last = net[2]  # type: ignore[index]
        last.bias[2] += 2000.0  # sample 1 is certain: its gradient is exactly 0
    samples = samples_of(net)
    assert float(samples.gradient[1].norm()) == 0.0
    made = protected(samples, budget)
    assert torch.equal(made.gradient[1], samples.gradient[1])
    assert float(made.variance[1]) == 0.0
    assert bool(torch.isfinite(made.gradient).all())
    assert float(made.variance[0]) > 0


def test_the_stream_goes_on_alike_whatever_the_search_took() -> None:
    samples = samples_of(network("trained"))
    states, messages = [], []
    for value in (0.0, 1e-6, 0.5, 1e4, 0.5):
        stream = torch.Generator().manual_seed(7)
        noise = EigenNoise(Budget(value), InputSpace(BOX))
        made = noise.protect(samples.gradient, generator=stream, samples=samples)
        states.append(stream.get_state())
        messages.append(made.gradient)
    assert all(torch.equal(states[0], state) for state in states)
    assert torch.equal(messages[2], messages[4])
    assert not torch.equal(messages[1], messages[2])


@pytest.mark.parametrize("kind", KINDS)
def test_messages_in_float32_have_the_budget(kind: str) -> None:
    samples = samples_of(network(kind), torch.float32)
    made = protected(samples, Budget(0.2))
    assert made.gradient.dtype == torch.float32
    found = made.delta.double().norm(dim=1)
    expected = 0.2 * samples.gradient.double().norm(dim=1)
    torch.testing.assert_close(found, expected, rtol=1.2e-3, atol=0.0)
    again = samples_of(network(kind))
    mixed = EigenNoise(Budget(0.2), InputSpace(BOX)).protect(
        again.gradient.float(),
        generator=torch.Generator().manual_seed(0),
        samples=again,
    )
    found = mixed.delta.double().norm(dim=1)
    torch.testing.assert_close(found, expected, rtol=1.2e-3, atol=0.0)


# -- several in one message ------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("relative", [0.01, 0.6])
def test_a_batch_has_its_budget_in_every_draw(
    kind: str, reduction: str, relative: float
) -> None:
    net, (x, y) = network(kind), private()
    samples = samples_of(net)
    weight = 1 / 3 if reduction == "mean" else 1.0
    clean = weight * sum(dense_gradient(net, x[i], y[i]) for i in range(3))
    assert isinstance(clean, Tensor)
    for seed in range(3):
        made = EigenNoise(Budget(relative), InputSpace(3.0)).protect_batch(
            samples.gradient,
            generator=torch.Generator().manual_seed(seed),
            samples=samples,
            reduction=reduction,  # type: ignore[arg-type]
        )
        size = float((made.gradient[0] - clean).norm())
        assert size == pytest.approx(relative * float(clean.norm()), rel=TOLERANCE)
        assert float(made.variance[0]) == pytest.approx(size**2, rel=1e-6)
        assert not made.knowledge.closed_form


def test_one_sample_is_a_batch_of_one() -> None:
    samples = samples_of(network("trained")).select(slice(1))
    noise = EigenNoise(Budget(0.4), InputSpace(BOX))
    alone, batch = (
        protect(
            samples.gradient,
            generator=torch.Generator().manual_seed(3),
            samples=samples,
        )
        for protect in (noise.protect, noise.protect_batch)
    )
    torch.testing.assert_close(alone.gradient, batch.gradient, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(alone.variance, batch.variance, rtol=1e-9, atol=0.0)
    assert batch.knowledge.closed_form


def test_a_part_of_a_gradient_becomes_that_part_of_the_moved_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of the last, smaller micro-batch of a step."""
    net, (x, y) = network("trained"), private()
    samples = samples_of(net)
    part = torch.tensor([[1.0], [1.0], [0.25]]).double()
    images: list[Tensor] = []
    image = InRange.image

    def seen(self: InRange, xi: Tensor) -> Tensor:
        images.append(image(self, xi))
        return images[-1]

    monkeypatch.setattr(InRange, "image", seen)
    made = EigenNoise(Budget(0.3), InputSpace(BOX)).protect_batch(
        part * samples.gradient, generator=torch.Generator(), samples=samples
    )
    rows = [dense_gradient(net, x[i] + images[-1][i], y[i]) for i in range(3)]
    expected = (part * torch.stack(rows)).mean(0)
    torch.testing.assert_close(made.gradient[0], expected, rtol=1e-9, atol=1e-12)
    asked = 0.3 * float((part * samples.gradient).mean(0).norm())
    assert float(made.delta.norm()) == pytest.approx(asked, rel=TOLERANCE)


# -- the search ------------------------------------------------------------------------


def solved(size: Callable[[float], float], target: float, start: float) -> _Search:
    search = _Search(target, start)
    while search.open and search.tries < MOST_TRIES:
        search.take(size(search.t), search.t)
    return search


@pytest.mark.parametrize(
    "size",
    [
        math.sqrt,
        lambda t: math.sqrt(t) + 1e3 * t**2,
        lambda t: t**0.05,
        lambda t: math.sqrt(t) * (1.3 + math.sin(40 * math.log(t))),
        lambda t: math.tanh(t) if t < 50 else math.nan,
        lambda t: math.sqrt(t) if t < 1e3 else math.inf,
        lambda t: max(0.0, t - 5.0),
    ],
)
@pytest.mark.parametrize("start", [1e-12, 1e-3, 1.0, 1e6])
def test_the_search_finds_every_continuous_size(
    size: Callable[[float], float], start: float
) -> None:
    search = solved(size, 0.6, start)
    assert size(search.low) == pytest.approx(0.6, rel=TOLERANCE)
    assert search.tries <= MOST_TRIES


def test_where_the_size_jumps_less_is_spent() -> None:
    search = solved(lambda t: 0.2 if t < 0.37 else 0.9, 0.6, 1.0)
    assert search.low == pytest.approx(0.37, rel=1e-2)
    assert search.low < 0.37
    none = solved(lambda t: 0.9, 0.6, 1.0)
    assert none.low == 0.0
    assert none.tries == MOST_TRIES


def test_a_first_guess_that_is_right_takes_one_try() -> None:
    assert solved(math.sqrt, 2.0, 4.0).tries == 1


def test_a_network_with_kinks_spends_no_more_than_its_budget() -> None:
    samples = samples_of(network("kinks"))
    for value in (0.05, 0.5, 2.0):
        for seed in range(4):
            made = protected(samples, Budget(value), seed)
            found = made.delta.norm(dim=1) / samples.gradient.norm(dim=1)
            assert float(found.max()) <= value * (1 + TOLERANCE) * (1 + 1e-9)
            assert float(found.max()) > 0.02 * value
            torch.testing.assert_close(
                made.variance.sqrt(), made.delta.norm(dim=1), rtol=1e-6, atol=0.0
            )


def test_gradients_are_taken_of_samples_that_are_not_right_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = samples_of(network("trained"))
    taken: list[int] = []
    changed = InRange.changed

    def counted(self: InRange, xi: Tensor, rows: list[int] | None = None) -> Tensor:
        taken.append(len(self) if rows is None else len(rows))
        return changed(self, xi, rows)

    monkeypatch.setattr(InRange, "changed", counted)
    protected(samples, Budget(0.5))
    assert len(taken) <= MOST_TRIES + 1
    assert taken[0] == taken[-1] == 3  # all at first, and all for the message
    assert min(taken) < 3
