from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from leakwatch.attacks import PixelScale, SharedGradient, Start, attack
from leakwatch.attacks.matching.distances import available, get
from leakwatch.attacks.verdict import (
    MATCHED,
    matched_to,
    mismatch,
    uninformed,
    verdict,
)
from leakwatch.derivatives import GradientMap

DOUBLE = torch.float64


def test_pixels_and_inputs_are_inverse_and_boxed() -> None:
    scale = PixelScale(mean=[0.1, 0.2, 0.3], std=[0.5, 1.0, 2.0])
    p = torch.rand(4, 2, 3, 5, 5, dtype=torch.float64)
    x = scale.to_input(p)
    torch.testing.assert_close(x[:, :, 2], (p[:, :, 2] - 0.3) / 2)
    torch.testing.assert_close(scale.to_pixels(x), p)
    torch.testing.assert_close(scale.clamp(x), x)
    wild = x + 10 * torch.randn(x.shape, dtype=torch.float64)
    boxed = scale.to_pixels(scale.clamp(wild))
    torch.testing.assert_close(boxed, scale.to_pixels(wild).clamp(0, 1))
    assert PixelScale.unknown().clamp(wild) is wild
    assert PixelScale.unknown().data_range is None
    assert PixelScale(low=-1.0, high=3.0).data_range == 4.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mean": [0.1]}, "give both or neither"),
        ({"low": None}, "belong together"),
        (
            {"mean": [0.1], "std": [1.0, 2.0]},
            "mean has 1 entries and std 2; expected one per channel",
        ),
        ({"mean": [0.1], "std": [0.0]}, "positive"),
        ({"low": 1.0, "high": 1.0}, "below high"),
        ({"channel": 1}, "negative"),
    ],
)
def test_bad_scales_are_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PixelScale(**arguments)  # type: ignore[arg-type]


def test_a_scale_of_other_channels_is_refused() -> None:
    with pytest.raises(ValueError, match="3 entries"):
        PixelScale([0.1, 0.2, 0.3], [1.0, 1.0, 1.0]).to_pixels(torch.rand(2, 1, 4, 4))


def test_starts_depend_on_seed_target_and_restart_only() -> None:
    def draw(targets: int, restarts: int, seed: int = 0, index=None):  # type: ignore[no-untyped-def]
        return Start.normal().draw(
            targets=targets,
            images=2,
            shape=(3, 4),
            restarts=restarts,
            seed=seed,
            index=index,
        )

    many = draw(5, 3)
    assert torch.equal(draw(2, 2), many[:2, :2])
    assert torch.equal(draw(1, 3, index=[4]), many[:, 4:])
    assert not torch.equal(draw(5, 3, seed=1), many)
    rows = many.reshape(30, -1)
    assert len(torch.unique(rows, dim=0)) == 30
    assert abs(float(rows.mean())) < 0.2
    assert float(rows.std()) == pytest.approx(1.0, abs=0.15)


def test_kinds_of_starts() -> None:
    scale = PixelScale([0.5], [0.25])
    uniform = Start.uniform().draw(
        targets=20, images=1, shape=(1, 8, 8), pixels=scale, dtype=torch.float64
    )
    pixels = scale.to_pixels(uniform)
    assert float(pixels.min()) >= 0
    assert float(pixels.max()) <= 1
    assert float(pixels.mean()) == pytest.approx(0.5, abs=0.05)
    assert not Start.zeros().draw(targets=1, images=1, shape=(2,)).any()
    truth = torch.rand(4, 3)
    near = Start.near(truth, 0.25).draw(targets=2, images=2, shape=(3,), restarts=2)
    away = (near - truth.view(2, 2, 3)).abs()
    torch.testing.assert_close(away, torch.full_like(away, 0.25))
    assert (near > truth.view(2, 2, 3)).any()
    assert (near < truth.view(2, 2, 3)).any()
    assert [s.practical for s in (Start.normal(), Start.near(truth))] == [True, False]


def test_bad_starts_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown start"):
        Start("far")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs true samples"):
        Start("near")
    with pytest.raises(ValueError, match="radius"):
        Start.near(torch.rand(1, 2), -1.0)
    with pytest.raises(ValueError, match="true samples of all targets"):
        Start.near(torch.rand(3, 2)).draw(targets=2, images=1, shape=(2,))
    with pytest.raises(ValueError, match="index must name"):
        Start.normal().draw(targets=2, images=1, shape=(2,), index=[1])


def test_shared_gradients_are_means_with_defense_then_noise() -> None:
    net = nn.Linear(3, 2)
    gradients = GradientMap(net, dtype=torch.float64)
    x, y = torch.rand(6, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1, 1])
    each = gradients(x, y)
    shared = SharedGradient.of(gradients, x, y, images=3)
    torch.testing.assert_close(shared.gradient, each.view(2, 3, -1).mean(1))
    assert shared.labels is not None
    assert shared.labels.tolist() == [[0, 1, 1], [0, 1, 1]]
    noisy = SharedGradient.of(
        gradients,
        x,
        y,
        noise_std=0.5,
        generator=torch.Generator().manual_seed(1),
        perturb=lambda g: 2 * g,
    )
    stream = torch.Generator().manual_seed(1)
    rows = [torch.randn(8, dtype=torch.float64, generator=stream) for _ in range(6)]
    noise = torch.stack(rows)
    torch.testing.assert_close(noisy.gradient, 2 * each + 0.5 * noise)
    assert noisy.noise_std == 0.5
    picked = noisy.select(torch.tensor([4, 1])).select(slice(1, 2))
    assert picked.index == (1,)
    torch.testing.assert_close(picked.gradient, noisy.gradient[1:2])
    assert noisy.without_labels().labels is None


def test_bad_shared_gradients_are_refused() -> None:
    gradients = GradientMap(nn.Linear(3, 2))
    x, y = torch.rand(3, 3), torch.tensor([0, 1, 1])
    with pytest.raises(ValueError, match="pass a multiple"):
        SharedGradient.of(gradients, x, y, images=2)
    with pytest.raises(ValueError, match="keep the shape"):
        SharedGradient.of(gradients, x, y, perturb=lambda g: g[:, :1])
    g = torch.ones(2, 4)
    for arguments, words in (
        ((g[0], None, (3,)), "floating point"),
        ((g / 0, None, (3,)), "target 0 is not finite"),
        ((g, y[:2], (3,)), "labels must be"),
        ((g, None, (3,), 0), "images must be"),
        ((g, None, (3,), 1, -1.0), "noise_std"),
        ((g, None, (3,), 1, 0.0, (1,)), "index must name"),
    ):
        with pytest.raises(ValueError, match=words):
            SharedGradient(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", available())
def test_distances_and_derivatives_are_the_textbook_ones(
    name: str, weighted: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    g, target = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64)
    weight = torch.rand(7, generator=generator, dtype=torch.float64)
    w = weight if weighted else torch.ones_like(weight)
    leaf = g.clone().requires_grad_()
    if name == "l2":
        expected = 0.5 * (w * (leaf - target) ** 2).sum(1)
    elif name == "l1":
        expected = (w * (leaf - target).abs()).sum(1)
    else:
        inner = (w * leaf * target).sum(1)
        lengths = (w * leaf**2).sum(1) * (w * target**2).sum(1)
        expected = 1 - inner / lengths.sqrt()
    value, slope = get(name)(g, target, weight if weighted else None)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(slope, torch.autograd.grad(expected.sum(), leaf)[0])
    same, flat = get(name)(target, target)
    assert float(same.max()) < 1e-30
    assert bool(torch.isfinite(flat).all())


def test_the_cosine_distance_keeps_its_digits_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(1, 1000, generator=generator, dtype=torch.float64)
    g = target + 1e-5 * torch.randn(1, 1000, generator=generator, dtype=torch.float64)
    exact, _ = get("cosine")(g, target)
    assert float(exact) < 1e-10  # far below what 1 − cos resolves in float32
    # The inputs of both must be the same numbers.
    value, _ = get("cosine")(g.float(), target.float())
    again, _ = get("cosine")(g.float().double(), target.float().double())
    torch.testing.assert_close(value.double(), again, rtol=1e-2, atol=0.0)


def test_verdicts_judge_the_rest_against_the_noise() -> None:
    net = nn.Linear(3, 2)
    gradients = GradientMap(net, dtype=torch.float64)
    x, y = torch.rand(2, 3, dtype=torch.float64), torch.tensor([0, 1])
    shared = SharedGradient.of(gradients, x, y)
    rest, turned = mismatch(gradients, shared, x[:, None], y[:, None])
    assert float(rest.max()) < 1e-14
    assert float(turned.max()) < 1e-14
    rest, turned = mismatch(gradients, shared, x.flip(0)[:, None], y[:, None])
    g, target = gradients(x.flip(0), y), shared.gradient
    torch.testing.assert_close(rest, (g - target).norm(dim=1) / target.norm(dim=1))
    directions = nn.functional.normalize(g) - nn.functional.normalize(target)
    torch.testing.assert_close(turned, directions.norm(dim=1))
    limit = matched_to(shared)
    torch.testing.assert_close(limit, torch.full_like(limit, MATCHED))
    size = float(shared.gradient[0].norm())
    noisy = SharedGradient(
        shared.gradient, y[:, None], (3,), noise_std=0.2 * size / math.sqrt(8)
    )
    expected = math.sqrt(1e-3**2 + 0.22**2)
    assert float(matched_to(noisy)[0]) == pytest.approx(expected)
    words = verdict(
        shared,
        torch.tensor([5e-4, 50.0]),
        doubts=("", "The labels were inferred: ok."),
    )
    assert words[0].word == "ok"
    assert words[1].reason.startswith("all of the gradient was not matched;")
    assert words[1].reason.endswith("The labels were inferred: ok.")


def test_a_defended_gradient_is_matched_as_well_as_its_sample_matches_it() -> None:
    """What a defense leaves at the truth is no fault of the attack."""
    gradients = GradientMap(nn.Linear(6, 3), dtype=torch.float64)
    x, y = torch.rand(3, 6).double(), torch.tensor([0, 1, 2])
    shift = 0.3 * torch.eye(21, dtype=torch.float64)[:3]
    shared = SharedGradient.of(gradients, x, y, perturb=lambda g: g + shift)
    assert shared.left is not None
    torch.testing.assert_close(shared.left, torch.full((3,), 0.3).double())
    some = shared.select(slice(1, 3)).left
    assert some is not None
    assert len(some) == 2
    rest = 0.3 / shared.gradient.norm(dim=1)
    base = 4 * rest
    assert [s.word for s in verdict(shared, rest, base=base)] == ["ok"] * 3
    plain = replace(shared, left=None)
    found = verdict(plain, rest, base=base)
    assert [s.word for s in found] == ["not converged"] * 3
    # A little better than what knows nothing is no match of a large defense's message.
    near = 1.08 * rest
    assert [s.word for s in verdict(shared, near, base=base)] == ["ok"] * 3
    (little, *_) = verdict(shared, near, base=1.12 * rest)
    assert little.word == "not converged"
    # Where any image does as well, matching proves nothing.
    (said, *_) = verdict(shared, rest, base=rest)
    assert said.word == "not converged"
    assert "what was added to the gradient is as large" in said.reason
    with pytest.raises(ValueError, match="left must hold one number"):
        replace(shared, left=torch.zeros(2))


def test_what_any_image_matches_does_not_count() -> None:
    # The bias hides the image: nearly all of the gradient is the same for any input.
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with torch.no_grad():
        net[1].weight.mul_(1e-3)
    gradients = GradientMap(net, dtype=torch.float64)
    x = torch.full((2, 1, 2, 2), 0.5, dtype=torch.float64)
    x = x + 0.01 * torch.randn(x.shape, dtype=torch.float64)
    y = torch.tensor([0, 1])
    shared = SharedGradient.of(gradients, x, y)
    base, _ = uninformed(gradients, shared, y[:, None], PixelScale())
    grey = torch.full_like(x, 0.5)
    rest, _ = mismatch(gradients, shared, grey[:, None], y[:, None])
    assert bool((base <= rest).all())
    assert bool((rest < 0.03).all())
    judged = verdict(shared, rest, base=base)
    assert [s.word for s in judged] == ["not converged"] * 2
    assert "where noise or plain grey leaves" in judged[0].reason
    right, _ = mismatch(gradients, shared, x[:, None], y[:, None])
    assert [s.word for s in verdict(shared, right, base=base)] == ["ok", "ok"]
    torch.testing.assert_close(matched_to(shared, base), 0.02 * base)


def test_a_matched_direction_of_another_length_is_no_match() -> None:
    # Without biases any multiple of an image has the direction of its gradient.
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(9, 2, bias=False))
    x, y = 0.2 * torch.rand(2, 1, 3, 3), torch.tensor([0, 1])
    found = attack(net, x, y, "lavp-cosine", steps=600, tv=0.0, data_range=1.0)
    assert float(found.relative.min()) > 0.5
    assert [s.word for s in found.status] == ["not converged"] * 2
    assert "not its length" in found.status[0].reason
    exact = attack(net, x, y, "gauss-newton", data_range=1.0)
    assert [s.word for s in exact.status] == ["ok"] * 2


def test_a_match_with_guessed_labels_is_not_plainly_ok() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(9, 2, bias=False))
    x, y = torch.rand(2, 1, 3, 3) - 0.9, torch.tensor([0, 1])
    found = attack(net, x, y, "gauss-newton", labels="inferred", steps=30)
    assert float(found.relative.max()) < 1e-4
    assert [s.word for s in found.status] == ["estimated"] * 2
    assert found.matched == (True, True)
    assert "labels were inferred" in found.status[0].reason


def test_gradients_without_information_are_not_blamed_on_noise() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        net[1].bias.fill_(-100.0)
    x, y = torch.rand(1, 1, 3, 3), torch.tensor([0])
    found = attack(net, x, y, "gauss-newton", steps=3, data_range=1.0)
    assert "says nothing about the sample" in found.status[0].reason
    assert "noise" not in found.status[0].reason


def test_very_confident_samples_are_recovered_in_float64() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(9, 8), nn.Sigmoid(), nn.Linear(8, 3))
    with torch.no_grad():
        net[3].bias.copy_(torch.tensor([95.0, 0.0, 0.0]))
    x, y = torch.rand(2, 1, 3, 3), torch.tensor([0, 0])
    found = attack(
        net, x, y, "gauss-newton", steps=40, restarts=3, data_range=1.0, dtype=DOUBLE
    )
    assert float((found.images - x).abs().max()) < 1e-6
    small = attack(net, x, y, "gauss-newton", steps=2, data_range=1.0)
    assert "dtype=torch.float64" in small.status[0].reason


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"preset": "lavp-l2", "chunk_size": 0}, "chunk_size"),
        ({"preset": "lavp-l2", "label_method": "x"}, "label_method"),
        ({"preset": "gauss-newton", "prior_mean": torch.zeros(5)}, "prior_mean"),
        ({"preset": "gauss-newton", "patience": 0}, "patience"),
        ({"preset": "combined", "first": 3}, "FirstOrder"),
        (
            {"preset": "combined", "stepz": 4},
            "'combined'; did you mean 'steps'. choose from .*share",
        ),
        ({"preset": "combined", "joint_labels": True}, "joint_labels"),
        ({"seed": 2**63}, "seed"),
        ({"time_limit": 0.0}, "time_limit must be positive"),
        ({"perturb": 3}, "perturb"),
        ({"progress": 3}, "progress"),
        ({"mean": "0.1", "std": [1.0]}, r"mean=\[0.5, 0.5, 0.5\]"),
        ({"noise_std": 1e39}, "noise_std=1e"),
        ({"preset": "ci-net", "distance": "x"}, "distance"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], words: str) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(9, 3))
    x, y = torch.rand(2, 1, 3, 3), torch.tensor([0, 1])
    with pytest.raises((TypeError, ValueError), match=words):
        attack(net, x, y, **{"data_range": None, **settings})


def test_numpy_seeds_are_integers() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(9, 3))
    x, y = torch.rand(2, 1, 3, 3), torch.tensor([0, 1])
    one = attack(net, x, y, steps=3, seed=np.int64(3))  # type: ignore[arg-type]
    torch.testing.assert_close(one.images, attack(net, x, y, steps=3, seed=3).images)


@pytest.mark.parametrize("preset", ["combined", "gauss-newton", "lavp-cosine"])
def test_only_shared_parameters_reach_the_attacker(preset: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(9, 8), nn.Sigmoid(), nn.Linear(8, 3))
    x, y = torch.rand(2, 1, 3, 3), torch.tensor([0, 2])
    found = attack(net, x, y, preset, steps=200, parameters="1", data_range=1.0)
    assert float((found.images - x).abs().max()) < 0.05
    # The head alone knows the image's eight features, not its nine pixels.
    head = attack(net, x, y, preset, steps=50, parameters="3", data_range=1.0)
    assert float((head.images - x).abs().max()) > 0.05


@pytest.mark.parametrize("preset", ["gauss-newton", "lavp-l2"])
def test_an_attack_looks_for_what_goes_into_the_preparation(preset: str) -> None:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Sigmoid(), nn.Linear(12, 3))
    x, y = torch.rand(2, 1, 4, 4), torch.tensor([0, 2])
    how: dict[str, Any] = {"start": Start.near(x, 0.05), "dtype": DOUBLE, "steps": 60}
    inside = attack(nn.Sequential(_Normalise(), net), x, y, preset, **how)
    before = attack(net, x, y, preset, prepare=lambda t: (t - 0.3) / 0.2, **how)
    torch.testing.assert_close(before.images, inside.images, rtol=1e-8, atol=1e-8)
    with pytest.raises(TypeError, match="prepare must be a function prepare"):
        attack(net, x, y, prepare="normalise")  # type: ignore[arg-type]


class _Normalise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - 0.3) / 0.2
