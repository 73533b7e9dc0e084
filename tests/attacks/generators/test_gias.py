"""GIAS and GION with a small generator whose range is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from leakwatch.attacks import (
    GIASAttack,
    PixelScale,
    Reconstruction,
    SharedGradient,
    Start,
)
from leakwatch.derivatives import GradientMap

PIXELS = PixelScale(mean=[0.5], std=[0.25])


class Decoder(nn.Module):
    """Two numbers to 1×4×4 pixels in (0, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 16)
        )

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.net(z).view(-1, 1, 4, 4).sigmoid()
        return out


def seeded(build: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


class Attacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh())
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.net(x))
        return out


def decoder() -> nn.Module:
    net = seeded(Decoder)
    with torch.no_grad():
        net.net[3].weight *= 4
    return net


def inside(n: int) -> Tensor:
    """Network inputs that the decoder can make."""
    z = torch.randn(n, 2, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return PIXELS.to_input(decoder().eval()(z))


def run(
    attack: GIASAttack, x: Tensor, images: int = 1, restarts: int = 3, **options: object
) -> tuple[Reconstruction, SharedGradient]:
    gradients = GradientMap(seeded(Attacked), dtype=torch.float64)
    y = torch.arange(len(x)) % 3
    shared = SharedGradient.of(gradients, x.double(), y, images=images)
    found = attack.run(
        gradients,
        shared,
        pixels=PIXELS,
        start=Start.normal(),
        seed=0,
        restarts=restarts,
        **options,  # type: ignore[arg-type]
    )
    return found, shared


def attack(**options: object) -> GIASAttack:
    arguments: dict[str, object] = {
        "latent_shape": (2,),
        "output_range": (0.0, 1.0),
        "latent_steps": 40,
        "weight_steps": 0,
        "tv": 0.0,
        **options,
    }
    return GIASAttack(decoder(), **arguments)  # type: ignore[arg-type]


def test_latents_recover_what_the_generator_can_make() -> None:
    x = inside(3)
    found, _ = run(attack(latent_steps=240), x)
    assert found.images.shape == (3, 1, 4, 4)
    assert [s.word for s in found.status] == ["ok"] * 3
    torch.testing.assert_close(found.images, x.double(), rtol=0, atol=0.1)
    assert found.loss.shape == (3,)
    assert found.attack == "gias"
    torch.testing.assert_close(found.loss, found.restart_loss.amin(0))


def test_the_second_phase_reaches_what_the_generator_can_not_make() -> None:
    generator = torch.Generator().manual_seed(1)
    x = PIXELS.to_input(torch.rand(2, 1, 4, 4, generator=generator) * 0.8 + 0.1)
    first, _ = run(attack(), x)
    both, _ = run(attack(weight_steps=80, weight_lr=3e-2), x)
    assert (both.loss < 0.2 * first.loss).all()
    error = [(r.images - x).square().flatten(1).mean(1) for r in (first, both)]
    assert (error[1] < 0.5 * error[0]).all()
    assert both.restart_images.shape == (3, 2, 1, 1, 4, 4)
    best = both.best_restart
    for t in range(2):
        torch.testing.assert_close(
            both.images[t], both.restart_images[best[t], t].squeeze(0)
        )
        assert both.iterations[t] == 120
        # The other restarts ended with the first phase.
        others = [r for r in range(3) if r != best[t]]
        torch.testing.assert_close(
            both.restart_loss[others, t], first.restart_loss[others, t]
        )


def test_joint_attacks_match_the_mean_gradient() -> None:
    x = inside(2)
    found, shared = run(attack(weight_steps=20), x, images=2)
    assert found.images.shape == (1, 2, 1, 4, 4)
    assert found.labels.tolist() == [[0, 1]]
    net = seeded(Attacked).double()
    loss = nn.functional.cross_entropy(net(found.images[0]), found.labels[0])
    g = torch.autograd.grad(loss, list(net.parameters()))
    flat = torch.cat([p.reshape(-1) for p in g])
    target = shared.gradient[0]
    cosine = nn.functional.cosine_similarity(flat, target, dim=0)
    assert found.loss.item() == pytest.approx(1 - cosine.item(), abs=1e-10)
    relative = ((flat - target).norm() / target.norm()).item()
    assert found.relative.item() == pytest.approx(relative, rel=1e-6)


def test_without_pretraining_the_parameters_are_drawn_anew() -> None:
    x = inside(1)
    plain = attack(pretrained=False, weight_steps=15, weight_lr=1e-2)
    found, _ = run(plain, x, restarts=2)
    assert found.attack == "gion"
    assert found.iterations.tolist() == [15]
    blank = attack(pretrained=False, weight_steps=15, weight_lr=1e-2)
    with torch.no_grad():
        for p in blank.generator.parameters():
            p.fill_(math.nan)
    again, _ = run(blank, x, restarts=2)
    torch.testing.assert_close(again.images, found.images)
    assert not torch.equal(found.restart_images[0], found.restart_images[1])


def test_generators_stay_as_they_were() -> None:
    tried = attack(weight_steps=5, latent_steps=5)
    tried.generator.train()
    before = {k: v.clone() for k, v in tried.generator.state_dict().items()}
    run(tried, inside(1))
    for name, value in tried.generator.state_dict().items():
        torch.testing.assert_close(value, before[name])
    assert tried.generator.training
    assert all(p.grad is None for p in tried.generator.parameters())


def test_progress_counts_both_phases_and_time_ends_them() -> None:
    told: list[tuple[int, int]] = []

    def progress(done: int, total: int, best: float) -> None:
        told.append((done, total))
        assert math.isfinite(best)

    run(attack(latent_steps=4, weight_steps=3), inside(1), progress=progress)
    assert told == [(i, 7) for i in range(1, 8)]
    found, _ = run(
        attack(latent_steps=100_000, weight_steps=3), inside(1), time_limit=0.2
    )
    assert found.seconds < 30
    assert len(found.history) >= 1
    assert found.iterations.item() < 100_000


class Constant(nn.Module):
    """Parameters of its own, and no way to draw them anew."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Parameter(torch.zeros(1, 4, 4))

    def forward(self, z: Tensor) -> Tensor:
        return self.image.expand(len(z), 1, 4, 4)


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        GIASAttack(lambda z: z, (2,))  # type: ignore[arg-type]
    for bad in ({"latent_steps": -1}, {"weight_steps": -1}):
        with pytest.raises(ValueError, match="must be at least 0"):
            attack(**bad)
    with pytest.raises(ValueError, match="nothing to search"):
        attack(latent_steps=0)
    with pytest.raises(ValueError, match="nothing to search"):
        attack(pretrained=False)
    with pytest.raises(ValueError, match="lr must be positive"):
        attack(latent_lr=0.0)
    with pytest.raises(ValueError, match=r"no reset_parameters\(\)"):
        GIASAttack(Constant(), (2,), pretrained=False)
    gradients = GradientMap(seeded(Attacked))
    shared = SharedGradient.of(gradients, inside(1), torch.tensor([0]))
    with pytest.raises(ValueError, match="range is not known"):
        attack().run(
            gradients,
            shared,
            pixels=PixelScale.unknown(),
            start=Start.normal(),
            seed=0,
            restarts=1,
        )
    with pytest.raises(ValueError, match="not at images of yours"):
        attack().run(
            gradients,
            shared,
            pixels=PIXELS,
            start=Start.normal(),
            seed=0,
            restarts=1,
            initial=torch.zeros(1, 1, 1, 1, 4, 4),
        )


def test_images_stay_in_range_where_the_generator_does_not() -> None:
    net = nn.Sequential(nn.Linear(2, 16), nn.Unflatten(1, (1, 4, 4)))
    with torch.no_grad():
        net[0].weight.mul_(1e3)
    attack = GIASAttack(net, (2,), output_range=(0, 1), latent_steps=2, weight_steps=2)
    found, _ = run(attack, inside(2))
    seen = PIXELS.to_pixels(found.images)
    assert float(seen.min()) >= -1e-6
    assert float(seen.max()) <= 1 + 1e-6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"latent_shape": 4}, "latent_shape"),
        ({"output_range": (1, -1)}, "output_range"),
        ({"distance": "x"}, "distance"),
    ],
)
def test_settings_are_checked_at_once(settings: dict[str, object], words: str) -> None:
    arguments: dict[str, object] = {"latent_shape": (2,), **settings}
    with pytest.raises((TypeError, ValueError), match=words):
        GIASAttack(decoder(), **arguments)  # type: ignore[arg-type]
