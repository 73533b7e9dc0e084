"""Optimal assignment of joint reconstructions, and baselines."""

from __future__ import annotations

import itertools

import pytest
import torch

from leakwatch.quality import METRICS, align, assign, best_constant, mean_image


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("seed", range(4))
def test_assignment_is_the_best_of_all_permutations(seed: int) -> None:
    a = torch.rand(2, 5, 1, 3, 3, generator=generator(seed), dtype=torch.float64)
    b = torch.rand(2, 5, 1, 3, 3, generator=generator(seed + 9), dtype=torch.float64)
    order = assign(a, b)
    for t in range(2):
        best = min(
            itertools.permutations(range(5)),
            key=lambda p: float((a[t, list(p)] - b[t]).square().sum()),
        )
        assert tuple(order[t].tolist()) == best


def test_shuffled_images_come_back_in_order() -> None:
    b = torch.rand(3, 6, 2, generator=generator(0))
    shuffles = torch.stack(
        [torch.randperm(6, generator=generator(i)) for i in range(3)]
    )
    a = torch.stack([b[t, shuffles[t]] for t in range(3)])
    torch.testing.assert_close(align(a, b), b, rtol=0, atol=0)


def test_one_original_is_never_shown_twice() -> None:
    b = torch.tensor([[[0.0], [10.0]]])
    a = torch.tensor([[[0.0], [0.1]]])
    assert assign(a, b).tolist() == [[0, 1]]


def test_broken_reconstructions_get_what_is_left() -> None:
    b = torch.tensor([[[0.0], [1.0], [2.0]]])
    a = torch.tensor([[[torch.nan], [2.0], [0.0]]])
    assert assign(a, b).tolist() == [[2, 0, 1]]
    assert sorted(assign(torch.full_like(b, torch.nan), b)[0].tolist()) == [0, 1, 2]


def test_assignment_checks_shapes() -> None:
    with pytest.raises(ValueError, match=r"\(targets, images, \.\.\.\)"):
        assign(torch.zeros(2, 3, 4), torch.zeros(2, 4, 3))


def test_no_constant_image_beats_the_best_one() -> None:
    x = torch.rand(3, 2, 4, 4, generator=generator(1), dtype=torch.float64)
    best = best_constant(x)

    def error(guess: torch.Tensor) -> torch.Tensor:
        return (guess - x).square().flatten(1).mean(1)

    expected = x.var((2, 3), correction=0).mean(1)
    torch.testing.assert_close(error(best), expected, rtol=1e-12, atol=0)
    for channel, step in itertools.product(range(2), (-1e-3, 1e-3)):
        other = best.clone()
        other[:, channel] += step
        assert (error(other) > error(best)).all()
    features = torch.tensor([[1.0, 3.0]])
    assert best_constant(features).tolist() == [[2.0, 2.0]]


def test_mean_images_leave_the_sample_itself_out() -> None:
    x = torch.tensor([[1.0], [2.0], [6.0]])
    assert mean_image(x).flatten().tolist() == [4.0, 3.5, 1.5]
    assert mean_image(x[:1]).item() == 0.0
    given = mean_image(x, torch.tensor([5.0]))
    assert given.flatten().tolist() == [5.0] * 3
    with pytest.raises(ValueError, match="shape of one sample"):
        mean_image(x, torch.zeros(2))


def test_every_metric_says_which_way_is_better() -> None:
    assert {n for n, m in METRICS.items() if m.higher_is_better} == {
        "psnr",
        "ssim",
        "fsim",
    }
    assert METRICS["psnr"].direction == "higher = more exposed"
    assert METRICS["lpips_vgg"].direction == "lower = more exposed"
