from __future__ import annotations

import math

import pytest
import torch

import leakwatch
from leakwatch.scores.measure import inputs
from leakwatch.studies.noise.spectra import INVERSE_SUM, RESOLVED_RANK, SpectrumKeeper
from studies.problems import eigenvalues, network, samples


def test_predictions_at_any_noise_from_one_jacobian(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[object] = []
    original = inputs.GradientJacobian

    def counted(*args: object, **more: object) -> object:
        made.append(args)
        return original(*args, **more)  # type: ignore[arg-type]

    x, y = samples()
    net, keeper = network(), SpectrumKeeper()
    monkeypatch.setattr(inputs, "GradientJacobian", counted)
    found = leakwatch.score(net, x, y, ["lavp", keeper.score], dtype=torch.float64)
    spectra = keeper.of(found)
    assert len(spectra) == len(x)
    # Above 25 dB the network counts as linear; below, the way is looked at too.
    kept = {s: [p.psnr(s).number for p in spectra] for s in (1e-3,)}
    assert min(kept[1e-3]) > 25
    assert len(made) == 1
    kept |= {s: [p.psnr(s).number for p in spectra] for s in (0.1, 3.0)}
    needed = [p.noise_for(15.0).number for p in spectra]
    for noise, predicted in kept.items():
        asked = leakwatch.score(
            net, x, y, "i2f_range_psnr", noise_std=noise, dtype=torch.float64
        )
        assert predicted == pytest.approx(asked["i2f_range_psnr"].tolist(), rel=1e-12)
    asked = leakwatch.score(
        net, x, y, "noise_std_for_range_psnr", target_psnr=15.0, dtype=torch.float64
    )
    # A search begins at minima found before, and what is kept has been asked more: it
    # ends within 0.02 dB of its target, in the same place up to the minima's accuracy.
    assert needed == pytest.approx(asked["noise_std_for_range_psnr"].tolist(), rel=1e-5)


def test_sum_and_rank_against_the_dense_jacobian() -> None:
    x, y = samples()
    net = network()
    found = leakwatch.score(
        net, x, y, [INVERSE_SUM, RESOLVED_RANK], dtype=torch.float64
    )
    for i in range(len(x)):
        lam = eigenvalues(net, x[i], y[i])
        expected = float((1 / lam).sum())
        assert found["inverse_sum"][i].item() == pytest.approx(expected, rel=1e-6)
    assert found["resolved_rank"].tolist() == [6.0] * len(x)


def test_a_gradient_that_hides_directions() -> None:
    x, y = samples(2)
    found = leakwatch.score(
        network(), x, y, [INVERSE_SUM, RESOLVED_RANK], parameters="3.bias"
    )
    assert [s.word for s in found.status["inverse_sum"]] == ["undefined"] * 2
    assert all(map(math.isnan, found["inverse_sum"].tolist()))
    # Three entries that sum to zero.
    assert found["resolved_rank"].tolist() == [2.0, 2.0]


def test_samples_without_a_spectrum_say_why() -> None:
    x, y = samples(2)
    keeper = SpectrumKeeper()
    found = leakwatch.score(network(), x, y, keeper.score, solver="power")
    for spectrum in keeper.of(found):
        value = spectrum.psnr(0.1)
        assert math.isnan(value.number)
        assert not value.status.usable
        assert "power" in value.status.reason
