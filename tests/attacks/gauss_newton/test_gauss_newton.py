"""The second-order attack as a whole: recovery, posterior, waves, combinations."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import leakwatch
from leakwatch.attacks import (
    FirstOrder,
    GaussNewton,
    GradientTask,
    Reconstruction,
    SearchResult,
    SharedGradient,
    Start,
)
from leakwatch.attacks.agreement import agreed
from leakwatch.attacks.coarse_to_fine import CoarseToFine
from leakwatch.attacks.combined import Combined, _lost
from leakwatch.attacks.gauss_newton import levenberg_marquardt
from leakwatch.attacks.gauss_newton.attack import Waves
from leakwatch.attacks.tries import Tries
from leakwatch.attacks.verdict import mismatch
from leakwatch.derivatives import GradientMap
from leakwatch.priors import natural_prior

from .gauss_newton_problems import PIXELS, net, problem, psnr, samples

# Does next to nothing.
STILL = GaussNewton(steps=1, damping=1e7)


def attacked(
    attack: GaussNewton | Combined,
    gradients: GradientMap,
    shared: SharedGradient,
    start: Start | None = None,
    restarts: int = 1,
    **more: object,
) -> Reconstruction:
    return attack.run(
        gradients,
        shared,
        pixels=PIXELS,
        start=start or Start.uniform(),
        seed=0,
        restarts=restarts,
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.ReLU])
def test_recovers_images_from_noise_to_a_hundred_decibels(
    activation: type[nn.Module],
) -> None:
    gradients, shared, x = problem(3, activation)
    found = attacked(GaussNewton(), gradients, shared, restarts=4)
    assert float(psnr(found.images, x).min()) > 100
    assert [s.word for s in found.status] == ["ok"] * 3
    assert float(found.relative.max()) < 1e-5
    assert found.practical


def test_without_a_matrix_it_does_so_too() -> None:
    gradients, shared, x = problem(1)
    attack = GaussNewton(method="matrix-free")
    found = attacked(attack, gradients, shared, restarts=4)
    assert float(psnr(found.images, x).min()) > 100


def test_an_affine_gradient_leads_to_the_posterior_in_closed_form() -> None:
    """∇ of Σ c·(W x) in W is c xᵀ: J is constant, and the answer a linear system."""
    linear = nn.Linear(6, 3, bias=False)
    slopes = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.3, -1.0]])

    def criterion(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (module(x) * slopes.to(x)[y.long()]).sum(1)

    gradients = GradientMap(linear, criterion, dtype=torch.float64)
    s, r, mean = 0.3, 0.5, torch.full((6,), 0.2, dtype=torch.float64)
    x = torch.rand(2, 6, generator=torch.Generator().manual_seed(0)).double()
    y = torch.arange(2)
    shared = SharedGradient.of(
        gradients, x, y, noise_std=s, generator=torch.Generator().manual_seed(1)
    )
    found = {}
    for method in ("dense", "matrix-free"):
        attack = GaussNewton(
            box=False, prior_std=r, prior_mean=mean, fast=False, forcing=1e-10
        ).changed(method=method)
        found[method] = attack.run(
            gradients, shared, pixels=PIXELS, start=Start.zeros()
        ).images
    for i in range(2):
        # In pixels: J = c ⊗ I / std.
        c = slopes[i].double()
        j = torch.kron(c[:, None], torch.eye(6, dtype=torch.float64)) / 0.25
        offset = -j @ torch.full((6,), 0.4, dtype=torch.float64)
        rest = shared.gradient[i] - offset
        h = j.T @ j + (s / r) ** 2 * torch.eye(6, dtype=torch.float64)
        expected = torch.linalg.solve(h, j.T @ rest + (s / r) ** 2 * mean)
        for images in found.values():
            pixels = images[i] * 0.25 + 0.4
            torch.testing.assert_close(pixels, expected, rtol=1e-5, atol=1e-6)


def test_a_target_does_not_depend_on_its_neighbours() -> None:
    gradients, shared, _ = problem(3, nn.ReLU)
    attack = GaussNewton(steps=6, fast=False)
    together = attacked(attack, gradients, shared, restarts=2)
    alone = attacked(attack, gradients, shared.select(torch.tensor([2])), restarts=2)
    torch.testing.assert_close(
        together.restart_images[:, 2:], alone.restart_images, rtol=1e-6, atol=1e-7
    )


def test_a_second_wave_shakes_what_kinks_hold_and_leaves_the_rest() -> None:
    gradients, shared, x = problem(2, nn.ReLU)
    first = x[None, :, None].clone()
    first[0, 1] += 0.3 * torch.randn(
        first[0, 1].shape, generator=torch.Generator().manual_seed(0)
    )
    both = first.expand(3, -1, -1, -1, -1, -1)
    attack = GaussNewton(steps=3, logits=False)
    found = attacked(attack, gradients, shared, restarts=3, initial=both)
    # The first target was solved from the start: no further wave.
    assert float(found.restart_loss[0, 0]) < 1e-12
    assert bool(torch.isinf(found.restart_loss[1:, 0]).all())
    assert bool(torch.isfinite(found.restart_loss[:2, 1]).all())
    assert bool(torch.isfinite(found.restart_images).all())
    assert found.best_restart[0] == 0


def test_no_network_is_asked_beyond_finite_numbers() -> None:
    """From images where g is NaN the attack returns what it began with."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner((x + 1).sqrt())
            return out

    gradients = GradientMap(Root(), dtype=torch.float64)
    y = torch.arange(2)
    good = torch.full((2, 1, 6, 6), 0.5, dtype=torch.float64)
    shared = SharedGradient.of(gradients, good, y)
    first = torch.zeros(1, 2, 1, 1, 6, 6, dtype=torch.float64)
    first[0, 1] = -1.5
    found = attacked(
        GaussNewton(box=False), gradients, shared, initial=first, restarts=1
    )
    assert bool(torch.isfinite(found.images).all())
    assert [s.word for s in found.status] == ["ok", "not converged"]
    torch.testing.assert_close(found.images[1], first[0, 1, 0], rtol=1e-12, atol=1e-12)


def test_labels_are_inferred_when_they_are_unknown() -> None:
    gradients, shared, x = problem(3)
    found = attacked(GaussNewton(), gradients, shared.without_labels(), restarts=4)
    assert found.labels.tolist() == [0, 1, 2]
    assert float(psnr(found.images, x).min()) > 100


@pytest.mark.parametrize("shared_parts", [None, ["2", "5", "criterion.factor"]])
def test_the_criterion_s_own_parameters_are_matched_too(
    shared_parts: list[str] | None,
) -> None:
    class Scaled(nn.Module):
        """Cross-entropy at a temperature that is trained, and shared."""

        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(1.5))

        def forward(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.factor * module(x), y, reduction="none")

    x, y = samples(2)
    gradients = GradientMap(
        net(nn.ReLU), Scaled(), parameters=shared_parts, dtype=torch.float64
    )
    assert list(gradients.with_criterion(gradients.criterion).sizes()) == list(
        gradients.sizes()
    )
    assert gradients.size % 2 == 1  # the layers share even numbers, the factor is one
    shared = SharedGradient.of(gradients, x, y)
    found = attacked(GaussNewton(), gradients, shared, Start.near(x, 0.1))
    assert [s.word for s in found.status] == ["ok"] * 2
    assert float(psnr(found.images, x).min()) > 100


def test_joint_attacks_from_near_find_both_images() -> None:
    gradients, shared, x = problem(4, images=2)
    found = attacked(GaussNewton(steps=30), gradients, shared, start=Start.near(x, 0.1))
    assert found.images.shape == (2, 2, 1, 6, 6)
    assert not found.practical
    assert float(psnr(found.images.flatten(0, 1), x).min()) > 80


def test_combined_arrives_where_its_first_attack_comes_near() -> None:
    gradients, shared, x = problem(2)
    first = FirstOrder(steps=60, lr=0.05)
    near = attacked(Combined(first=first, second=STILL), gradients, shared, restarts=2)
    both = attacked(Combined(first=first), gradients, shared, restarts=2)
    assert both.attack == "combined"
    assert float(psnr(near.images, x).max()) < 60
    assert float(psnr(both.images, x).min()) > 100


def test_combined_begins_gauss_newton_at_the_best_of_its_first_attack_s() -> None:
    gradients, shared, x = problem(2)
    first = FirstOrder(steps=60, lr=0.05)
    still = Combined(first=first, coarse=None, second=STILL)
    found = attacked(still, gradients, shared, restarts=2)
    slopes, loss = Combined().first_problems(gradients, shared)
    ends = []
    for seed, (at, given) in enumerate((slopes, loss)):
        # Either map shares what it was said to share, at the private images.
        torch.testing.assert_close(
            at(x.float(), given.labels[:, 0]), given.gradient, rtol=1e-4, atol=1e-6
        )
        alone = first.run(
            at, given, pixels=PIXELS, start=Start.uniform(), seed=seed, restarts=1
        )
        ends.append(alone.images.double())
    turned = torch.stack(
        [mismatch(gradients, shared, e[:, None], shared.labels)[1] for e in ends]
    )
    best = torch.stack(ends)[turned.argmin(0), torch.arange(2)]
    torch.testing.assert_close(found.images, best, rtol=0, atol=1e-3)


def test_combined_descends_in_two_ways_on_two_problems() -> None:
    gradients, shared, _ = problem(2)
    both = Combined(second=STILL)
    task = GradientTask(
        gradients=gradients, shared=shared, labels=shared.labels, pixels=PIXELS,
        start=Start.uniform(), seed=0, restarts=4,
    )  # fmt: skip
    slopes, loss = both.first_problems(gradients, shared)

    def turns(attack: Combined) -> list[tuple[bool, str, float]]:
        return [
            (
                torch.equal(message.gradient, slopes[1].gradient),
                engine.name,
                engine.priors.tv if isinstance(engine, FirstOrder) else 0.0,
            )
            for (_, message), engine in attack._ways(task)
        ]

    assert turns(both) == [
        (True, "cosine", 1e-2),
        (False, "coarse-to-fine", 0.0),
        (True, "cosine", 1e-4),
        (False, "cosine", 0.2),
    ]
    one = [weight for _, _, weight in turns(both.changed(tv=0.05))]
    assert one == [0.05, 0.0, 0.05, 0.05]
    assert not torch.equal(slopes[1].gradient, loss[1].gradient)


def test_combined_with_one_restart_or_unknown_slopes() -> None:
    gradients, shared, x = problem(2)
    first = FirstOrder(steps=60, lr=0.05)
    one = attacked(Combined(first=first), gradients, shared, restarts=1)
    assert one.restart_images.shape[0] == 1
    plain = Combined(first=first, second=GaussNewton(logits=False))
    assert len(plain.first_problems(gradients, shared)) == 1
    found = attacked(plain, gradients, shared, restarts=2)
    assert float(psnr(found.images, x).max()) > 40
    inferred = attacked(Combined(first=first), gradients, shared.without_labels())
    assert inferred.labels.tolist() == one.labels.tolist()


def test_combined_keeps_to_its_time() -> None:
    gradients, shared, _ = problem(2)
    attack = Combined(first=FirstOrder(steps=10**6))
    found = attacked(attack, gradients, shared, restarts=2, time_limit=2.0)
    assert found.seconds < 6


def test_settings_of_the_combination() -> None:
    changed = Combined().changed(share=0.25, steps=7, tv=1e-3, damping=0.5)
    assert (changed.share, changed.first.steps, changed.second.steps) == (0.25, 7, 7)
    assert (changed.first.priors.tv, changed.second.damping) == (1e-3, 0.5)
    assert Combined().changed(box=False).first.box is False
    with pytest.raises(ValueError, match="share"):
        Combined(share=1.0)
    with pytest.raises(ValueError, match="lrr"):
        Combined().changed(lrr=1)


def test_initial_images_of_another_shape() -> None:
    gradients, shared, _ = problem()
    with pytest.raises(ValueError, match="initial must be"):
        attacked(GaussNewton(), gradients, shared, initial=torch.zeros(1, 2, 1, 5, 5))


def test_progress_counts_all_waves() -> None:
    gradients, shared, _ = problem()
    seen: list[tuple[int, int, float]] = []
    attacked(
        GaussNewton(steps=2, logits=False),
        gradients,
        shared,
        restarts=2,
        progress=lambda *now: seen.append(now),
    )
    assert [done for done, _, _ in seen] == [1, 2, 3, 4]
    assert {total for _, total, _ in seen} == {4}


@pytest.mark.parametrize(("images", "noise_std"), [(2, 0.0), (1, 1e-3)])
def test_steps_are_counted_where_the_attack_is(
    images: int, noise_std: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients, shared, x = problem(2 * images, noise_std=noise_std, images=images)
    # Both have no easier problem in logits to begin with.
    assert shared.labels is not None
    task = GradientTask(
        gradients=gradients,
        shared=shared,
        labels=shared.labels,
        pixels=PIXELS,
        start=Start.near(x, 0.05),
        seed=0,
        restarts=1,
    )
    waves = Waves(GaussNewton(steps=2), task)
    assert waves.easier is None
    targets = torch.arange(2)
    first = waves.first_images()[0].flatten(1)
    descend = Waves._descend

    def on_the_cpu(*arguments: Any) -> Any:
        with torch.device("cpu"):
            return descend(*arguments)

    monkeypatch.setattr(Waves, "_descend", on_the_cpu)
    # Whatever is made without a device is not on that of the images now.
    with torch.device("meta"):
        found = waves.descend(targets, first)
    assert found.steps.tolist() == [2, 2]


@pytest.mark.parametrize(("images", "noise_std"), [(2, 0.0), (1, 1e-3)])
def test_gauss_newton_without_an_easier_problem_on_any_device(
    images: int, noise_std: float, device: str
) -> None:
    x, y = (t.to(device) for t in samples(2 * images))
    gradients = GradientMap(net().to(device), dtype=torch.float64)
    shared = SharedGradient.of(
        gradients,
        x,
        y,
        images=images,
        noise_std=noise_std,
        generator=torch.Generator().manual_seed(2),
    )
    found = GaussNewton(steps=2).run(
        gradients,
        shared,
        pixels=PIXELS,
        start=Start.near(x, 0.05),
        seed=0,
        restarts=1,
    )
    assert found.images.device.type == device


@pytest.mark.parametrize("preset", ["gauss-newton", "combined"])
def test_what_a_forward_writes_is_not_left_in_the_network(preset: str) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)
            self.register_buffer("total", torch.zeros(3))
            self.plain, self.calls = torch.zeros(1), [0]

        def forward(self, x: Tensor) -> Tensor:
            self.total += 1
            self.plain.add_(1)
            self.calls.append(1)
            return self.fc(x.flatten(1))

    module = Counting()
    x, y = torch.rand(2, 1, 2, 3), torch.tensor([0, 1])
    leakwatch.attack(module, x, y, preset, steps=2)
    assert not module.total.any()
    assert not module.plain.any()
    assert module.calls == [0]


def test_combined_keeps_its_first_images_where_the_second_does_not_arrive() -> None:
    gradients, shared, _ = problem(2)
    first = FirstOrder(steps=60, lr=0.05)
    near = attacked(Combined(first=first, second=STILL), gradients, shared, restarts=4)
    length = shared.gradient.norm(dim=1)
    result = SearchResult(
        images=torch.full_like(near.restart_images, 0.5),
        loss=near.restart_loss * 0 + 0.5 * length.square(),
        steps=torch.zeros_like(near.restart_loss, dtype=torch.long),
    )
    assert _lost(result, shared).tolist() == [True, True]
    arrived = replace(result, loss=torch.tensor([1e-6, 0.5]) * result.loss)
    assert _lost(arrived, shared).tolist() == [False, True]
    unlikely = torch.tensor([[0.4], [0.1], [0.3], [0.2]])
    relative = torch.full((4, 1), 0.2)
    tries = Tries(
        near.restart_images[:, 1:],
        relative,
        relative,
        unlikely,
        torch.arange(4)[:, None],
    ).sorted_by(unlikely)
    kept = tries.into(arrived, length[1:], torch.tensor([1]))
    best = kept.best_of(kept.images)
    assert torch.equal(best[1], near.restart_images[1, 1])
    assert torch.equal(kept.images[:, 0], arrived.images[:, 0])
    assert torch.equal(kept.loss[:, 0], arrived.loss[:, 0])
    expected = 0.5 * (0.2 * length[1]) ** 2
    torch.testing.assert_close(kept.loss[:, 1], expected.expand(4))


def test_combined_returns_what_all_tries_agree_upon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where Gauss-Newton does not arrive, here because it takes one tiny step."""
    monkeypatch.setattr("leakwatch.attacks.combined._ARRIVED", 1e-3)
    gradients, shared, _ = problem(2)
    first = FirstOrder(steps=12, lr=0.02)
    attack = Combined(first=first, second=STILL, coarse=CoarseToFine(steps=12))
    found = attacked(attack, gradients, shared, restarts=4)
    ways = attack._ways(
        GradientTask(
            gradients=gradients,
            shared=shared,
            labels=shared.labels,
            pixels=PIXELS,
            start=Start.uniform(),
            seed=0,
            restarts=4,
        )
    )
    made = [
        engine.run(
            *at, pixels=PIXELS, start=Start.uniform(), seed=seed, restarts=1
        ).images.double()[:, None]
        for seed, (at, engine) in enumerate(ways)
    ]
    y = shared.labels
    assert y is not None
    turned = torch.stack([mismatch(gradients, shared, x, y)[1] for x in made])
    pixels = torch.stack([PIXELS.to_pixels(x) for x in made])
    prior = natural_prior((1, 6, 6))
    apart = pixels.flatten(3) - prior.mean.flatten()
    unlikely = turned.square() / 2 + 1e-3 * (apart * prior.solve(apart)).mean((2, 3))
    expected = PIXELS.clamp(PIXELS.to_input(agreed(pixels, unlikely, prior)))
    torch.testing.assert_close(found.images, expected[:, 0], atol=1e-4, rtol=0)


def test_combined_spends_no_time_on_steps_that_take_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gradients, shared, _ = problem(2)
    taken: list[int] = []
    run = Waves.run

    def counted(self: Waves) -> SearchResult:
        result = run(self)
        taken.append(int(result.steps.max()))
        return result

    monkeypatch.setattr(Waves, "run", counted)
    monkeypatch.setattr("leakwatch.attacks.combined._ARRIVED", 1e-3)
    attack = Combined(
        first=FirstOrder(steps=9, lr=0.02), coarse=CoarseToFine(steps=9), second=STILL
    )
    monkeypatch.setattr(Waves, "seconds_of_step", 60.0)
    found = attacked(attack, gradients, shared, restarts=4, time_limit=60.0)
    assert taken == []
    assert found.restart_images.shape[0] == 4
    assert found.seconds < 50
    monkeypatch.setattr(Waves, "seconds_of_step", 0.0)
    attacked(attack, gradients, shared, restarts=4, time_limit=60.0)
    assert taken == [1]


def test_attacks_that_make_no_way_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(levenberg_marquardt, "_NEAR", 0.0)
    gradients, shared, _ = problem(2)
    task = GradientTask(
        gradients=gradients, shared=shared, labels=shared.labels, pixels=PIXELS,
        start=Start.uniform(), seed=0, restarts=2,
    )  # fmt: skip
    waves = Waves(GaussNewton(steps=9), task)
    waves.look_at = 0.0  # Before the first step.
    stopped = waves.run()
    assert int(stopped.steps.sum()) == 0
    waves = Waves(GaussNewton(steps=9), task)
    waves.look_at = time.perf_counter() + 1e6
    going = waves.run()
    assert int(going.steps.max()) > 2
