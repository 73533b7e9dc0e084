from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from cases import CASES
from torch import Tensor, nn

from attacks.problems import plain_gradient
from leakwatch.attacks import (
    FirstOrder,
    PixelScale,
    Reconstruction,
    SharedGradient,
    Start,
)
from leakwatch.attacks.matching.priors import Priors
from leakwatch.derivatives import GradientMap

BY_NAME = {case.name: case for case in CASES}
SHAPE = (1, 6, 6)
BOX = PixelScale()


def smooth() -> nn.Module:
    """A network that attacks recover exactly: wide, smooth, not saturated."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(1, 6, 3, stride=1, padding=1),
            nn.Sigmoid(),
            nn.Flatten(),
            nn.Linear(216, 4),
        )


def data(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(n, *SHAPE, generator=generator, dtype=torch.float64)
    return x, torch.arange(n) % 4


def run(
    attack: FirstOrder,
    n: int = 2,
    module: nn.Module | None = None,
    images: int = 1,
    **changes: Any,
) -> tuple[Reconstruction, Tensor]:
    x, y = data(n)
    gradients = GradientMap(module or smooth(), dtype=torch.float64)
    shared = changes.pop("shared", None)
    if shared is None:
        shared = SharedGradient.of(gradients, x, y, images=images)
    options: dict[str, Any] = {
        "pixels": BOX,
        "start": Start.normal(),
        "seed": 0,
        "restarts": 1,
    }
    return attack.run(gradients, shared, **{**options, **changes}), x


@pytest.mark.parametrize(
    "attack",
    [
        FirstOrder(distance="l2", optimizer="lbfgs", box=False, steps=120),
        FirstOrder(distance="cosine", optimizer="lbfgs", box=False, steps=120),
        FirstOrder(distance="l2", optimizer="adam", steps=200),
        FirstOrder(distance="cosine", optimizer="adam", steps=200),
        FirstOrder(distance="cosine", optimizer="adam", signed=True, steps=250),
        FirstOrder(distance="l2", optimizer="sgd", lr=30.0, relative=True, steps=250),
    ],
    ids=["l2-lbfgs", "cos-lbfgs", "l2-adam", "cos-adam", "cos-signed", "l2-sgd"],
)
def test_images_are_recovered_from_their_gradients(attack: FirstOrder) -> None:
    found, x = run(attack)
    assert found.images.shape == x.shape
    assert [str(s) for s in found.status] == ["ok", "ok"]
    assert float((found.images - x).square().mean()) < 1e-4  # 40 dB
    assert found.attack == "first-order"
    assert found.start == "normal"
    assert found.practical


def test_what_is_reported_is_what_the_images_give() -> None:
    attack = FirstOrder(distance="l2", steps=30)
    found, x = run(attack, 3, restarts=2)
    net = smooth().double()
    _, y = data(3)
    for i in range(3):
        target = plain_gradient(net, x[i : i + 1], y[i : i + 1]).detach()
        losses = []
        for r in range(2):
            image = found.restart_images[r, i]
            g = plain_gradient(net, image, y[i : i + 1]).detach()
            losses.append(0.5 * (g - target).square().sum())
            torch.testing.assert_close(found.restart_loss[r, i], losses[-1])
        best = int(torch.stack(losses).argmin())
        assert int(found.best_restart[i]) == best
        torch.testing.assert_close(found.loss[i], losses[best])
        torch.testing.assert_close(found.images[i], found.restart_images[best, i, 0])
        rest = (2 * losses[best]).sqrt() / target.norm()
        torch.testing.assert_close(found.relative[i], rest)
    assert found.history is not None
    assert found.history.shape[1:] == (2, 3)
    assert bool((found.history.min(0).values >= found.restart_loss - 1e-12).all())


@pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])
def test_a_target_does_not_depend_on_the_others(optimizer: Any) -> None:
    x, y = data(4)
    gradients = GradientMap(smooth(), dtype=torch.float64)
    shared = SharedGradient.of(gradients, x, y)
    attack = FirstOrder(
        optimizer=optimizer, box=False, steps=25, priors=Priors(tv=1e-3), chunk_size=3
    )
    options: dict[str, Any] = {
        "pixels": BOX,
        "start": Start.normal(),
        "seed": 3,
        "restarts": 2,
    }
    together = attack.run(gradients, shared, **options)
    for some in (slice(2, 3), torch.tensor([2, 0])):
        alone = attack.run(gradients, shared.select(some), **options)
        torch.testing.assert_close(
            alone.restart_images[:, 0],
            together.restart_images[:, 2],
            rtol=1e-7,
            atol=1e-8,
        )
        torch.testing.assert_close(alone.loss[0], together.loss[2], rtol=1e-6, atol=0)


def test_batched_adam_follows_the_sequential_published_loop() -> None:
    x, y = data(2)
    gradients = GradientMap(smooth(), dtype=torch.float64)
    shared = SharedGradient.of(gradients, x, y)
    start = Start.normal().draw(
        targets=2, images=1, shape=SHAPE, restarts=1, dtype=torch.float64
    )
    steps = 40
    attack = FirstOrder(signed=True, steps=steps, priors=Priors(tv=1e-2))
    found = attack.run(
        gradients, shared, pixels=BOX, start=Start.normal(), initial=start
    )
    net = smooth().double()
    for i in range(2):
        leaf = start[0, i].clamp(0, 1).requires_grad_()
        optimizer = torch.optim.Adam([leaf], lr=0.1)
        marks = [math.ceil(steps * k / 8) for k in (3, 5, 7)]
        decay = torch.optim.lr_scheduler.MultiStepLR(optimizer, marks, 0.1)
        target = shared.gradient[i]
        best, image = math.inf, leaf.detach()
        for step in range(steps + 1):
            g = plain_gradient(net, leaf, y[i : i + 1])
            value = 1 - g @ target / (g.norm() * target.norm())
            tv = leaf.diff(dim=-1).abs().mean() + leaf.diff(dim=-2).abs().mean()
            value = value + 1e-2 * tv
            if value.item() < best:
                best, image = value.item(), leaf.detach().clone()
            if step == steps:
                break
            leaf.grad = torch.autograd.grad(value, leaf)[0].sign()
            optimizer.step()
            decay.step()
            leaf.data.clamp_(0, 1)
        torch.testing.assert_close(found.images[i], image[0], rtol=1e-7, atol=1e-8)


def test_joint_attacks_rebuild_all_images_of_one_gradient() -> None:
    attack = FirstOrder(distance="l2", optimizer="lbfgs", box=False, steps=250)
    found, x = run(attack, 4, images=2, restarts=2)
    assert found.images.shape == (2, 2, *SHAPE)
    assert found.labels.tolist() == [[0, 1], [2, 3]]
    assert [s.word for s in found.status] == ["ok", "ok"]
    # Labels differ within a target, so the order is known.
    assert float((found.images - x.view(2, 2, *SHAPE)).abs().max()) < 1e-2


def test_labels_can_be_optimised_together_with_the_images() -> None:
    x, y = data(3)
    gradients = GradientMap(smooth(), dtype=torch.float64)
    shared = SharedGradient.of(gradients, x, y).without_labels()
    attack = FirstOrder(
        distance="l2",
        optimizer="lbfgs",
        schedule="constant",
        box=False,
        joint_labels=True,
        steps=250,
    )
    found = attack.run(gradients, shared, pixels=BOX, start=Start.normal(), restarts=3)
    assert found.labels.tolist() == y.tolist()
    assert float((found.images - x).abs().max()) < 0.05


def test_unknown_labels_are_inferred() -> None:
    x, y = data(3)
    gradients = GradientMap(smooth(), dtype=torch.float64)
    shared = SharedGradient.of(gradients, x, y).without_labels()
    found, _ = run(FirstOrder(steps=3), 3, shared=shared)
    assert found.labels.tolist() == y.tolist()


def test_attacks_that_matched_leave_early() -> None:
    x, _ = data(3)
    near = Start.near(x, radius=0.0)
    found, _ = run(FirstOrder(steps=200), 3, start=near)
    assert found.iterations.tolist() == [0, 0, 0]
    assert not found.practical
    torch.testing.assert_close(found.images, x, rtol=0, atol=0)
    far = torch.stack([x[0], x[1] + 0.3, x[2]])[None, :, None]
    found, _ = run(FirstOrder(steps=45, box=False), 3, initial=far)
    assert found.iterations.tolist() == [0, 45, 0]


def test_patience_ends_attacks_that_do_not_improve() -> None:
    # Total variation alone decides, and is minimal at once.
    attack = FirstOrder(steps=300, patience=15, lr=1e-30, schedule="constant")
    found, _ = run(attack)
    assert int(found.iterations.max()) <= 15 + 10


class Cliff(nn.Module):
    """NaN for images whose mean is above a limit."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.net = smooth()
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        root = (self.limit - x.flatten(1).mean(1)).sqrt()
        return self.net(x) + 0 * root[:, None]


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "lbfgs"])
def test_nan_restores_the_best_and_takes_smaller_steps(optimizer: Any) -> None:
    attack = FirstOrder(
        distance="l2",
        optimizer=optimizer,
        lr=3.0 if optimizer != "sgd" else 300.0,
        relative=True,
        steps=40,
        box=False,
        schedule="constant",
    )
    x, _ = data(3)
    near = Start.near(x, radius=0.2)
    found, _ = run(attack, 3, Cliff(0.7), start=near)
    assert bool(torch.isfinite(found.restart_images).all())
    assert bool(torch.isfinite(found.loss).all())
    calm, _ = run(attack, 3, start=near)
    assert float(found.images.flatten(1).mean(1).max()) < 0.7
    first = run(attack.changed(steps=1, lr=1e-30), 3, start=near)[0].loss
    assert bool((found.loss < first).all())
    assert bool(torch.isfinite(calm.loss).all())


def test_a_start_where_nothing_is_finite_is_moved() -> None:
    high = torch.full((1, 2, 1, *SHAPE), 3.0, dtype=torch.float64)
    found, _ = run(FirstOrder(steps=30, box=False), 2, Cliff(0.9), initial=high)
    assert bool(torch.isfinite(found.loss).all())
    never, _ = run(FirstOrder(steps=30, box=False), 2, Cliff(-9.0), shared=_other(2))
    assert bool(torch.isfinite(never.images).all())
    assert [s.word for s in never.status] == ["not converged"] * 2
    assert "finite numbers" in never.status[0].reason


def _other(n: int) -> SharedGradient:
    x, y = data(n)
    return SharedGradient.of(GradientMap(smooth(), dtype=torch.float64), x, y)


def test_failed_attacks_say_what_failed_and_never_that_a_sample_is_safe() -> None:
    failed, _ = run(FirstOrder(steps=1))
    assert [s.word for s in failed.status] == ["not converged"] * 2
    assert "another minimum or needs more steps" in failed.status[0].reason
    assert not any("safe" in s.reason for s in failed.status)
    late, _ = run(FirstOrder(steps=100_000), time_limit=0.05)
    assert "time was over" in late.status[0].reason
    assert late.seconds < 20
    x, y = data(2)
    gradients = GradientMap(smooth(), dtype=torch.float64)
    noisy = SharedGradient.of(gradients, x, y, noise_std=10.0)
    found, _ = run(FirstOrder(steps=2), shared=noisy)
    assert "as large as what it says about the image" in found.status[0].reason
    zero = SharedGradient(torch.zeros(2, gradients.size), y[:, None], SHAPE)
    found, _ = run(FirstOrder(steps=2), shared=zero)
    assert [s.word for s in found.status] == ["failed"] * 2
    assert bool(torch.isfinite(found.images).all())


def test_images_stay_in_the_box_of_pixels() -> None:
    scale = PixelScale(mean=[0.4], std=[0.2])
    wide = Start.near(data(2)[0], radius=10.0)
    for steps in (1, 20):
        found, _ = run(FirstOrder(steps=steps, lr=1.0), pixels=scale, start=wide)
        pixels = scale.to_pixels(found.restart_images)
        assert float(pixels.min()) > -1e-9
        assert float(pixels.max()) < 1 + 1e-9
    free, _ = run(FirstOrder(steps=1, box=False, lr=1e-9), pixels=scale, start=wide)
    assert float(scale.to_pixels(free.restart_images).max()) > 1.1


def test_progress_is_reported_and_the_module_left_alone() -> None:
    calls: list[tuple[int, int, float]] = []
    module = smooth().train()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    torch.manual_seed(0)
    state = torch.get_rng_state()
    run(FirstOrder(steps=20), module=module, progress=lambda *a: calls.append(a))
    assert calls[-1][:2] == (20, 20)
    assert math.isfinite(calls[-1][2])
    assert torch.equal(torch.get_rng_state(), state)
    assert module.training
    assert all("forward" not in vars(m) for m in module.modules())
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key])


def test_float32_and_float64_start_from_the_same_images() -> None:
    x, y = data(1)
    images = []
    for dtype in (torch.float32, torch.float64):
        gradients = GradientMap(smooth(), dtype=dtype)
        shared = SharedGradient.of(gradients, x.to(dtype), y)
        found = FirstOrder(steps=3).run(
            gradients, shared, pixels=BOX, start=Start.uniform()
        )
        images.append(found.images.double())
        assert found.images.dtype == dtype
    torch.testing.assert_close(images[0], images[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"distance": "l3"}, "unknown distance"),
        ({"optimizer": "rmsprop"}, "optimizer must be one of"),
        ({"schedule": "linear"}, "unknown schedule"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"momentum": 1.0}, r"momentum must lie in \[0, 1\)"),
        ({"steps": 0}, "steps must be"),
        ({"patience": 0}, "patience must be"),
        ({"tolerance": math.nan}, "tolerance must be"),
        ({"tv": -1.0}, "weight tv"),
        ({"optimizer": "lbfgs"}, "box=False"),
        ({"optimizer": "lbfgs", "box": False, "signed": True}, "signed=False"),
        ({"learning_rate": 1.0}, "unknown setting learning_rate.*lr"),
        ({"priors": 3}, r"Priors\(...\)"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FirstOrder().changed(**changes)


def test_bad_runs_are_refused() -> None:
    for changes, words in (
        ({"restarts": 0}, "restarts"),
        ({"time_limit": 0.0}, "time_limit"),
        ({"initial": torch.zeros(1, 2, *SHAPE)}, "initial must be"),
    ):
        with pytest.raises(ValueError, match=words):
            run(FirstOrder(steps=1), **changes)


def test_every_combination_of_settings_runs() -> None:
    x, y = BY_NAME["batchnorm"].data(2)
    gradients = GradientMap(BY_NAME["batchnorm"].module(), dtype=torch.float64)
    shared = SharedGradient.of(gradients, x, y)
    for distance, optimizer, decay in itertools.product(
        ("l2", "cosine", "l1"), ("adam", "sgd", "lbfgs"), ("constant", "cosine")
    ):
        attack = FirstOrder(
            distance=distance,
            optimizer=optimizer,  # type: ignore[arg-type]
            schedule=decay,  # type: ignore[arg-type]
            lr=0.01,
            box=False,
            steps=2,
            priors=Priors(tv=1e-3, l2=1e-3, batch_norm=1e-2),
            path="layerwise",
        )
        found = attack.run(gradients, shared, pixels=BOX, start=Start.zeros())
        assert bool(torch.isfinite(found.loss).all())
