"""Search spaces, and the search through them, against plain autograd."""

from __future__ import annotations

import logging
import math
import time

import pytest
import torch
from torch import Tensor, nn

from leakwatch.attacks import PixelScale, SharedGradient
from leakwatch.attacks.generators.search import Phase, search
from leakwatch.attacks.generators.search_space import (
    GeneratorWeights,
    Latents,
    OutputScale,
)
from leakwatch.attacks.generators.stacked_modules import ModuleCopies
from leakwatch.attacks.matching.objective import MatchingProblem
from leakwatch.derivatives import GradientMap

SHAPE = (1, 4, 4)
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def draw(*size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator, dtype=torch.float64)


def seeded(build: type[nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


class Generator(nn.Module):
    """Latents of 3 numbers to images of 1×4×4 in (−1, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 16)
        self.norm = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.norm(self.linear(z).view(-1, 4, 2, 2)).relu()
        out: Tensor = nn.functional.pixel_shuffle(self.conv(x), 2).tanh()
        return out


class Pixels:
    """The images themselves as a search space."""

    def __init__(self, start: Tensor) -> None:
        self._x = start.detach().clone().requires_grad_()

    @property
    def attacks(self) -> int:
        return len(self._x)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self._x,)

    def images(self) -> Tensor:
        return self._x * 1.0


class Branching(Generator):
    """One that torch.func can't batch."""

    def forward(self, z: Tensor) -> Tensor:
        out = super().forward(z)
        return out if bool(out.sum() > 1e9) else out * 1.0


class Attacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(48, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


RAW = OutputScale(None, PixelScale.unknown(), SHAPE)


def problem(
    x: Tensor, y: Tensor, images: int, distance: str = "l2"
) -> tuple[GradientMap, MatchingProblem]:
    gradients = GradientMap(seeded(Attacked), dtype=torch.float64)
    shared = SharedGradient.of(gradients, x, y, images=images)
    return gradients, MatchingProblem(gradients, shared, distance, path="loop")


# -- copies ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Generator, Branching])
@pytest.mark.parametrize("train", [False, True])
def test_copies_equal_their_originals(
    kind: type[nn.Module], train: bool, caplog: pytest.LogCaptureFixture
) -> None:
    originals = [seeded(kind, i).double().train(train) for i in range(3)]
    z = draw(3, 5, 3)
    with caplog.at_level(logging.WARNING):
        copies = ModuleCopies(originals, train=train, dtype=torch.float64)
        for _ in range(2):  # BatchNorm's running statistics move in train mode
            found = copies(z)
            expected = torch.stack(
                [m(zi) for m, zi in zip(originals, z, strict=True)]
            ).detach()
            torch.testing.assert_close(found.detach(), expected, **TIGHT)
    one_by_one = kind is Branching and not train
    assert len(caplog.records) == one_by_one


@pytest.mark.parametrize("train", [False, True])
def test_copies_have_gradients_of_their_own(train: bool) -> None:
    originals = [seeded(Generator, i).double().train(train) for i in range(2)]
    copies = ModuleCopies(originals, train=train, dtype=torch.float64)
    z, push = draw(2, 3, 3), draw(2, 3, *SHAPE, seed=1)
    found = torch.autograd.grad(copies(z), list(copies.parameters.values()), push)
    for i, original in enumerate(originals):
        expected = torch.autograd.grad(
            original(z[i]), list(original.parameters()), push[i]
        )
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a[i], b, **TIGHT)


def test_copies_leave_the_original_alone() -> None:
    original = seeded(Generator).requires_grad_(False)
    before = {k: v.clone() for k, v in original.state_dict().items()}
    copies = ModuleCopies([original], train=True)
    copies(torch.zeros(1, 4, 3) + torch.arange(4.0)[:, None])
    with torch.no_grad():
        copies.parameters["conv.weight"].add_(1)
    for name, value in original.state_dict().items():
        torch.testing.assert_close(value, before[name])
    assert not any(p.requires_grad for p in original.parameters())
    assert original.training


def test_copies_need_parameters() -> None:
    with pytest.raises(ValueError, match="at least one network that has parameters"):
        ModuleCopies([nn.Flatten()])
    with pytest.raises(ValueError, match="at least one network"):
        ModuleCopies([])


# -- search spaces -----------------------------------------------------------------


def test_outputs_become_network_inputs() -> None:
    pixels = PixelScale(mean=[0.5], std=[0.25], low=0.0, high=2.0)
    scale = OutputScale((-1.0, 1.0), pixels, (1, 2, 2))
    out = torch.tensor([[[-1.0, 0.0], [0.5, 1.0]]])[None]
    expected = torch.tensor([[[-2.0, 2.0], [4.0, 6.0]]])[None]
    torch.testing.assert_close(scale(out), expected)
    raw = OutputScale(None, pixels, (1, 2, 2))
    torch.testing.assert_close(raw(out), out)


def test_larger_outputs_are_cropped_around_the_centre() -> None:
    out = torch.arange(16.0).view(1, 1, 4, 4)
    scale = OutputScale(None, PixelScale(), (1, 2, 2))
    assert scale(out).flatten().tolist() == [5.0, 6.0, 9.0, 10.0]
    for shape in ((1, 5, 4), (2, 4, 4)):
        with pytest.raises(ValueError, match="the network takes"):
            OutputScale(None, PixelScale(), shape)(out)
    with pytest.raises(ValueError, match="network takes"):
        OutputScale(None, PixelScale(), (3, 2, 2))(out)
    with pytest.raises(ValueError, match="network takes"):
        OutputScale(None, PixelScale(), (3,))(out.flatten(1))


def test_bounds_of_outputs_are_checked() -> None:
    with pytest.raises(ValueError, match="range is not known"):
        OutputScale((0.0, 1.0), PixelScale.unknown(), SHAPE)
    with pytest.raises(ValueError, match="low to a larger high"):
        OutputScale((1.0, 0.0), PixelScale(), SHAPE)


def test_every_space_makes_the_images_that_its_parameters_say() -> None:
    generator = seeded(Generator).double().eval()
    z = draw(2, 3, 3)
    expected = generator(z.flatten(0, 1)).detach().view(2, 3, *SHAPE)
    spaces = (
        Pixels(expected),
        Latents(generator, z, RAW),
        GeneratorWeights([generator] * 2, z, RAW),
        GeneratorWeights([generator] * 6, z, RAW),
    )
    for space in spaces:
        assert space.attacks == 2
        torch.testing.assert_close(space.images().detach(), expected, **TIGHT)
        assert all(p.requires_grad and p.is_leaf for p in space.parameters)
    with pytest.raises(ValueError, match="need 2 generators, one each, or 6"):
        GeneratorWeights([generator] * 3, z, RAW)


def test_rows_of_parameters_belong_to_one_attack() -> None:
    generator = seeded(Generator)
    z = draw(2, 3, 3)
    for space in (
        Latents(generator, z, RAW),
        GeneratorWeights([generator] * 2, z, RAW, train=True),
        GeneratorWeights([generator] * 6, z, RAW),
    ):
        for i in range(2):
            gradients = torch.autograd.grad(space.images()[i].sum(), space.parameters)
            for g in gradients:
                other = g.reshape(2, -1)[1 - i]
                torch.testing.assert_close(other, torch.zeros_like(other))


# -- search ------------------------------------------------------------------------


def adam_by_torch(
    gradients: GradientMap, start: Tensor, y: Tensor, target: Tensor, phase: Phase
) -> tuple[Tensor, float, list[float]]:
    """The published loop for one attack, by torch.optim and plain autograd."""
    net = seeded(Attacked).double()
    x = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([x], lr=phase.lr)
    best, least, history = start, math.inf, []
    for step in range(phase.steps + 1):
        loss = nn.functional.cross_entropy(net(x), y)
        g = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        flat = torch.cat([p.reshape(-1) for p in g])
        distance = 0.5 * (flat - target).square().sum()
        history.append(distance.item())
        if history[-1] < least:
            best, least = x.detach().clone(), history[-1]
        if step == phase.steps:
            break
        objective = distance
        if phase.tv:
            across, down = x.diff(dim=-1).abs().mean(), x.diff(dim=-2).abs().mean()
            objective = objective + phase.tv * (across + down)
        (x.grad,) = torch.autograd.grad(objective, x)
        if phase.signed:
            x.grad = x.grad.sign()
        optimizer.param_groups[0]["lr"] = phase.rate(step)
        optimizer.step()
    return best, least, history


@pytest.mark.parametrize(
    "phase",
    [
        Phase(12, 0.1),
        Phase(12, 0.1, signed=True, decay=True),
        Phase(12, 0.05, tv=0.1),
    ],
)
def test_search_is_adam_on_each_attack_alone(phase: Phase) -> None:
    x, y = draw(4, *SHAPE), torch.tensor([0, 2, 1, 1])
    gradients, task = problem(x, y, images=2)
    start = draw(4, 2, *SHAPE, seed=7)
    targets = torch.tensor([0, 1, 0, 1])
    labels = y.view(2, 2)[targets]
    seen: list[Tensor] = []
    with task.opened() as matcher:
        found = search(
            matcher,
            Pixels(start),
            labels,
            targets,
            phase,
            tick=lambda _, loss: seen.append(loss.clone()),
        )
    assert len(seen) == 12
    for i in range(4):
        target = task.shared.gradient[targets[i]]
        best, least, history = adam_by_torch(
            gradients, start[i], labels[i], target, phase
        )
        torch.testing.assert_close(found.images[i], best, rtol=1e-7, atol=1e-9)
        assert found.loss[i].item() == pytest.approx(least, rel=1e-8)
        running = [min(history[: k + 1]) for k in range(12)]
        assert [float(s[i]) for s in seen] == pytest.approx(running, rel=1e-8)
    assert found.steps.tolist() == [12] * 4
    assert not found.stopped
    assert found.broken == (False,) * 4


def test_the_matching_distance_is_zero_at_the_truth() -> None:
    x, y = draw(4, *SHAPE), torch.tensor([0, 2, 1, 1])
    for distance in ("l2", "cosine", "l1"):
        _, task = problem(x, y, 2, distance)
        with task.opened() as matcher:
            truth = x.view(2, 2, *SHAPE)
            found = search(
                matcher, Pixels(truth), y.view(2, 2), torch.arange(2), Phase(3, 0.1)
            )
        assert found.loss.max() < 1e-14
        torch.testing.assert_close(found.images, truth)


def test_latents_are_found_when_the_truth_is_in_the_generators_range() -> None:
    generator = seeded(Generator).double().eval()
    truth = draw(1, 2, 3, seed=3)
    x = generator(truth[0]).detach()
    y = torch.tensor([0, 2])
    _, task = problem(x, y, 2, "cosine")
    space = Latents(generator, truth + 0.3 * draw(1, 2, 3, seed=4), RAW)
    with task.opened() as matcher:
        found = search(
            matcher, space, y[None], torch.zeros(1).long(), Phase(300, 0.02, decay=True)
        )
    assert found.loss.item() < 1e-8
    torch.testing.assert_close(found.images[0], x, rtol=0, atol=1e-2)
    torch.testing.assert_close(
        Latents(generator, found.parameters[0], RAW).images().detach(),
        found.images,
        **TIGHT,
    )


class Fragile(nn.Module):
    """Gives NaN for images that are brighter than 2 on average."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        room = 2 - x.flatten(1).mean(1, keepdim=True)
        out: Tensor = self.linear(x.flatten(1)) * room.sqrt()
        return out


def test_attacks_that_break_go_back_and_take_smaller_steps() -> None:
    gradients = GradientMap(seeded(Fragile), dtype=torch.float64)
    x, y = torch.full((1, *SHAPE), 1.9, dtype=torch.float64), torch.tensor([1])
    shared = SharedGradient.of(gradients, x, y)
    start = torch.zeros(2, 1, *SHAPE, dtype=torch.float64)
    start[0] = 1.0
    start[1] = 5.0  # never finite
    with MatchingProblem(gradients, shared, path="loop").opened() as matcher:
        found = search(
            matcher,
            Pixels(start),
            y.expand(2, 1),
            torch.zeros(2).long(),
            Phase(60, lr=1.5),
        )
    assert found.images.isfinite().all()
    assert found.loss[0] < 1.0
    assert math.isinf(found.loss[1])
    assert found.broken == (False, True)
    assert 0 < found.steps[0] < 60
    torch.testing.assert_close(found.images[1], start[1])


def test_search_ends_with_the_time() -> None:
    x, y = draw(2, *SHAPE), torch.tensor([0, 2])
    _, task = problem(x, y, 2)
    with task.opened() as matcher:
        found = search(
            matcher,
            Pixels(draw(1, 2, *SHAPE, seed=1)),
            y[None],
            torch.zeros(1).long(),
            Phase(10_000, 0.1),
            deadline=time.monotonic(),
        )
    assert found.stopped
    assert found.steps.tolist() == [1]
    assert found.loss.isfinite().all()


def test_phases_are_checked() -> None:
    with pytest.raises(ValueError, match="steps must be"):
        Phase(0, 0.1)
    for lr in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="lr must be"):
            Phase(1, lr)
    with pytest.raises(ValueError, match="tv must be"):
        Phase(1, 0.1, tv=-1.0)
