"""CI-Net: its architecture as published, its width, and one small attack."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from leakwatch.attacks import (
    CINetAttack,
    PixelScale,
    Reconstruction,
    SharedGradient,
    Start,
)
from leakwatch.attacks.generators.ci_generator import (
    CINet,
    choose_width,
    enclosing_side,
    parameter_count,
)
from leakwatch.derivatives import GradientMap

GREY = PixelScale(mean=[0.5], std=[0.5])


def attacked() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1, stride=2),
            nn.Sigmoid(),
            nn.Flatten(),
            nn.Linear(54, 4),
        )


def images(n: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(n, 1, 3, 3, generator=generator)
    return nn.functional.interpolate(coarse, size=(6, 6), mode="bilinear") * 2 - 1


def run(
    targets: int = 1, *, labels: bool = True, index: tuple[int, ...] | None = None
) -> tuple[Reconstruction, Tensor]:
    gradients = GradientMap(attacked())
    x, y = images(4), torch.tensor([0, 2, 1, 3])
    shared = SharedGradient.of(gradients, x, y, images=2)
    shared = shared.select(slice(0, targets) if index is None else torch.tensor(index))
    if not labels:
        shared = shared.without_labels()
    result = CINetAttack(steps=12, width=6, latent=8).run(
        gradients, shared, pixels=GREY, start=Start.normal(), seed=3, restarts=2
    )
    return result, x


@pytest.mark.parametrize(
    ("width", "published"),
    [(32, 140e3), (64, 428e3), (128, 1.45e6), (256, 5.25e6), (512, 19.9e6)],
)
def test_parameter_counts_are_the_published_ones(width: int, published: float) -> None:
    assert parameter_count(3, 32, width, 128) == pytest.approx(published, rel=4e-3)


@pytest.mark.parametrize("side", [4, 8, 32, 64, 128, 256])
def test_parameter_count_is_that_of_the_network(side: int) -> None:
    net = CINet(3, side, width=8, latent=5)
    assert parameter_count(3, side, 8, 5) == sum(p.numel() for p in net.parameters())
    with torch.no_grad():
        assert net(torch.zeros(2, 5)).shape == (2, 3, side, side)


def test_layers_are_the_published_ones() -> None:
    net = CINet(3, 32, width=8)
    convolutions = [m for m in net.blocks.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 8
    for conv in convolutions:
        assert torch.linalg.matrix_norm(conv.weight.flatten(1), 2).item() == (
            pytest.approx(1.0, abs=0.2)
        )
        assert nn.utils.parametrize.is_parametrized(conv)
    for layer in (net.first[0], net.last):
        assert not nn.utils.parametrize.is_parametrized(layer)
    upsampling = [m for m in net.modules() if isinstance(m, nn.Upsample)]
    assert [m.mode for m in upsampling] == ["nearest"] * 3
    slopes = {m.negative_slope for m in net.modules() if isinstance(m, nn.LeakyReLU)}
    assert slopes == {0.1}
    assert net(torch.randn(2, 128) * 9).abs().max() < 1
    free = CINet(3, 4, width=8, bounded=False)
    with torch.no_grad():
        free.last.bias.fill_(5.0)
    assert free(torch.zeros(1, 128)).max() > 1


def test_width_grows_until_the_generator_is_over_parameterised() -> None:
    common = {"channels": 3, "side": 32}
    # The paper's rule needs 512 channels for a ResNet18; the code, which looks at the
    # pixels instead, takes 32 for batch 16.
    paper = choose_width("paper", shared_parameters=11_173_962, images=16, **common)
    code = choose_width("code", shared_parameters=11_173_962, images=16, **common)
    assert (paper, code) == (512, 32)
    assert choose_width("code", shared_parameters=1, images=64, **common) == 64
    exactly = parameter_count(3, 32, 32, 128)
    for shared, width in ((exactly - 1, 32), (exactly, 64)):
        assert (
            choose_width("paper", shared_parameters=shared, images=1, **common) == width
        )
    with pytest.raises(ValueError, match="'paper' or 'code'"):
        choose_width("wide", shared_parameters=1, images=1, **common)  # type: ignore[arg-type]


def test_sides_are_rounded_up_to_what_it_can_make() -> None:
    assert [enclosing_side(n) for n in (1, 4, 5, 28, 32, 33)] == [4, 4, 8, 32, 32, 64]
    with pytest.raises(ValueError, match="not of 28; use 32 and crop"):
        CINet(1, 28)


def test_attack_moves_towards_the_gradient_and_stays_in_the_box() -> None:
    found, x = run()
    assert found.images.shape == (1, 2, 1, 6, 6)
    assert found.restart_images.shape == (2, 1, 2, 1, 6, 6)
    assert found.images.abs().max() <= 1
    best = int(found.best_restart)
    torch.testing.assert_close(found.images, found.restart_images[best])
    assert found.loss.item() == found.restart_loss.min().item()
    assert (found.attack, found.start, found.practical) == ("ci-net", "normal", True)
    # The loss that is told is that of the images that come with it.
    net = attacked()
    flat = []
    for guess in (found.images[0], x[:2], torch.zeros(2, 1, 6, 6)):
        loss = nn.functional.cross_entropy(net(guess), torch.tensor([0, 2]))
        g = torch.autograd.grad(loss, list(net.parameters()))
        flat.append(torch.cat([p.reshape(-1) for p in g]))
    cosine = nn.functional.cosine_similarity(flat[0], flat[1], dim=0)
    assert found.loss.item() == pytest.approx(1 - cosine.item(), abs=1e-5)
    relative = (flat[0] - flat[1]).norm() / flat[1].norm()
    assert found.relative.item() == pytest.approx(relative.item(), rel=1e-3)
    # Plain grey matches most of this gradient: coming a little nearer shows nothing.
    grey = nn.functional.cosine_similarity(flat[2], flat[1], dim=0)
    assert (2 - 2 * grey.item()) ** 0.5 < 0.5
    assert (2 * found.loss.item()) ** 0.5 > 0.1 * (2 - 2 * grey.item()) ** 0.5
    assert found.status[0].word == "not converged"
    assert found.history is not None
    assert found.history.shape == (12, 2, 1)
    assert found.history.min() >= found.loss
    first = CINetAttack(steps=1, width=6, latent=8)
    gradients = GradientMap(net)
    shared = SharedGradient.of(gradients, x[:2], torch.tensor([0, 2]), images=2)
    begun = first.run(
        gradients, shared, pixels=GREY, start=Start.normal(), seed=3, restarts=2
    )
    assert found.loss < 0.9 * begun.loss


def test_a_targets_result_does_not_depend_on_the_others() -> None:
    together, _ = run(2)
    alone, _ = run(index=(1,))
    torch.testing.assert_close(together.images[1], alone.images[0], rtol=0, atol=2e-3)
    first, _ = run(1)
    assert not torch.equal(first.images[0], together.images[1])


def test_attack_moves_no_random_stream_and_repeats() -> None:
    torch.manual_seed(1)
    run()
    before = torch.get_rng_state()
    first, _ = run()
    torch.testing.assert_close(torch.get_rng_state(), before)
    again, _ = run()
    torch.testing.assert_close(first.images, again.images, rtol=0, atol=1e-6)


def test_unknown_labels_are_inferred() -> None:
    found, _ = run(labels=False)
    assert found.labels.tolist() == [[0, 2]]


def test_unbounded_for_inputs_of_unknown_range() -> None:
    gradients = GradientMap(attacked())
    shared = SharedGradient.of(gradients, images(1) * 5, torch.tensor([1]))
    found = CINetAttack(steps=3, width=8, latent=8).run(
        gradients,
        shared,
        pixels=PixelScale.unknown(),
        start=Start.normal(),
        seed=0,
        restarts=1,
    )
    assert found.images.shape == (1, 1, 6, 6)
    assert found.labels.shape == (1,)


def test_arguments_are_checked() -> None:
    for bad in ({"steps": 0}, {"lr": 0.0}, {"width": 0}, {"latent": 0}, {"tv": -1.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            CINetAttack(**bad)  # type: ignore[arg-type]
    gradients = GradientMap(attacked())
    shared = SharedGradient.of(gradients, images(1), torch.tensor([1]))
    attack = CINetAttack(steps=1, width=8)
    with pytest.raises(ValueError, match=r"Start.normal\(\)"):
        attack.run(
            gradients,
            shared,
            pixels=GREY,
            start=Start.near(images(1)),
            seed=0,
            restarts=1,
        )
    with pytest.raises(ValueError, match="restarts must be"):
        attack.run(
            gradients, shared, pixels=GREY, start=Start.normal(), seed=0, restarts=0
        )
    flat = GradientMap(nn.Linear(5, 3))
    features = SharedGradient.of(flat, torch.rand(1, 5), torch.tensor([1]))
    with pytest.raises(ValueError, match="makes images"):
        attack.run(
            flat, features, pixels=GREY, start=Start.normal(), seed=0, restarts=1
        )
