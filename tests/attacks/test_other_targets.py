"""Attacks take the targets that scores take, with a criterion."""

from __future__ import annotations

import pytest
import torch
from other_targets import TARGETS, network, samples

import leakwatch


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("images", [1, 2])
def test_an_image_is_found_whatever_its_target_is(name: str, images: int) -> None:
    x, y = samples(name, 2)
    found = leakwatch.attack(
        network(60), x, y, "gauss-newton", start="near", restarts=1, images=images,
        data_range=1.0, criterion=TARGETS[name].criterion,
    )  # fmt: skip
    assert {s.word for s in found.status} == {"ok"}
    torch.testing.assert_close(found.images.reshape(x.shape), x, rtol=0, atol=1e-3)
    assert found.labels.reshape(y.shape).equal(y)


@pytest.mark.parametrize("name", TARGETS)
def test_descent_comes_nearer(name: str) -> None:
    x, y = samples(name, 2)
    first, last = (
        leakwatch.attack(
            network(), x, y, "lavp-l2", start="near", restarts=2, steps=steps,
            data_range=1.0, radius=0.2, criterion=TARGETS[name].criterion,
        ).relative
        for steps in (1, 60)
    )  # fmt: skip
    assert bool((last < 0.5 * first).all())


@pytest.mark.parametrize("name", TARGETS)
def test_what_needs_classes_says_so(name: str) -> None:
    x, y = samples(name, 2)
    criterion = TARGETS[name].criterion
    with pytest.raises(ValueError, match="labels='inferred' reads class indices"):
        leakwatch.attack(
            network(), x, y, "lavp-l2", labels="inferred", criterion=criterion
        )
    with pytest.raises((TypeError, ValueError), match="criterion"):
        leakwatch.attack(network(), x, y, "lavp-l2")
    with pytest.raises(ValueError, match="unfairness takes class indices only"):
        leakwatch.unfairness(network(), x, y, 1e-2, criterion=criterion)


@pytest.mark.parametrize("name", TARGETS)
def test_a_noise_is_recommended(name: str) -> None:
    x, y = samples(name, 2)
    found = leakwatch.recommend_noise(
        network(), x, y, target_psnr=20, data_range=1.0, prior_std=0.3, check=1,
        criterion=TARGETS[name].criterion,
    )  # fmt: skip
    assert [probe.label for probe in found.probes] == [None] * 2
    if name != "number":  # whose gradient nearly vanishes at one sample
        assert found.noise_std > 0
