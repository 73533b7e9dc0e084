from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import leakwatch
from leakwatch import Status
from leakwatch.scores import Settings, Value
from leakwatch.status import OK
from leakwatch.studies import Check
from leakwatch.studies.noise.check import CheckAttack
from leakwatch.studies.noise.required import enough
from leakwatch.studies.noise.spectra import NoiseResponse
from studies.problems import network, samples

TARGET = 15.0


def predicted(noise_std: float) -> list[float]:
    x, y = samples()
    found = leakwatch.score(
        network(), x, y, "i2f_range_psnr", noise_std=noise_std, dtype=torch.float64
    )
    return sorted(found["i2f_range_psnr"].tolist(), reverse=True)


def test_the_smallest_noise_that_holds_the_worst() -> None:
    x, y = samples()
    found = leakwatch.recommend_noise(network(), x, y, target_psnr=TARGET, check=0)
    assert found.status == Status("estimated", "predicted, not checked by an attack")
    # Rounding in float64 is allowed for, upwards. Where the network bends, the search
    # ends when the prediction is at most 0.2 dB below the target.
    assert predicted(found.noise_std)[0] == pytest.approx(TARGET, abs=0.2)
    assert predicted(found.noise_std)[0] <= TARGET + 1e-9
    assert predicted(0.95 * found.noise_std)[0] > TARGET
    assert found.probes[0].needed.number == found.noise_std
    assert found.predicted == found.noise_std
    norms = leakwatch.score(network(), x, y, "grad_norm", dtype=torch.float64)
    size = sum(p.numel() for p in network().parameters())
    for p in found.probes:
        norm = norms["grad_norm"][p.sample].item()
        expected = found.noise_std * math.sqrt(size) / norm
        assert p.noise_to_gradient == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("share", "held"), [(0.5, 3), (0.51, 4), (1 / 6, 1)])
def test_a_share_of_the_probes(share: float, held: int) -> None:
    x, y = samples()
    found = leakwatch.recommend_noise(
        network(), x, y, target_psnr=TARGET, share=share, check=0
    )
    psnr = predicted(found.noise_std)
    # No more noise than that takes: another probe may be held by chance.
    assert TARGET - 0.2 < sorted(psnr)[held - 1] <= TARGET
    assert sum(v <= TARGET for v in predicted(0.95 * found.noise_std)) == held - 1


def test_a_target_below_the_mean_image_cannot_be_reached() -> None:
    x, y = samples()
    found = leakwatch.recommend_noise(network(), x, y, target_psnr=5.0)
    assert math.isnan(found.noise_std)
    assert found.status.word == "undefined"
    assert "for 6 of 6 probes no noise is known that keeps" in found.status.reason
    assert "mean image" in found.status.reason
    assert "no noise can be recommended" in str(found)
    assert all(not p.psnr.status.usable for p in found.probes)


def test_a_probe_that_looks_like_the_mean_image_cannot_be_held() -> None:
    x, y = samples()
    x[4] = 0.45
    found = leakwatch.recommend_noise(network(), x, y, target_psnr=TARGET, check=0)
    assert math.isnan(found.noise_std)
    assert found.status.word == "undefined"
    assert "1 of 6 probes" in found.status.reason
    assert "alone reaches 26.0 dB" in found.status.reason
    assert found.probes[0].sample == 4
    rest = leakwatch.recommend_noise(
        network(), x, y, target_psnr=TARGET, share=5 / 6, check=0
    )
    assert rest.noise_std > 0


def test_a_gradient_that_shows_too_little_needs_no_noise() -> None:
    x, y = samples()
    found = leakwatch.recommend_noise(
        network(), x, y, target_psnr=20.0, parameters="3.bias", check=1
    )
    assert found.noise_std == 0.0
    assert found.probes[0].psnr.status.word == "not computed"
    assert len(found.checks) == 2


def strided() -> nn.Module:
    """On 8 × 8 pixels it does not see the last row and column, 15 pixels."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, stride=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(54, 10)
    ).double()


def images_for_it(unseen: float) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    x = torch.rand(3, 1, 8, 8, generator=draw, dtype=torch.float64).clamp(0.2, 0.8)
    x[..., 7, :] = x[..., :, 7] = unseen
    return x


@pytest.mark.parametrize("target", [20.0, 25.0])
def test_pixels_that_a_stride_skips_change_nothing(target: float) -> None:
    # Mid-grey, which is what an attacker has for them.
    x, y = images_for_it(0.5), torch.arange(3)
    found = leakwatch.recommend_noise(strided(), x, y, target_psnr=target, check=0)
    # The same without them, for the same squared error.
    target += 10 * math.log10(49 / 64)
    x = x[..., :7, :7]
    seen = leakwatch.recommend_noise(strided(), x, y, target_psnr=target, check=0)
    assert found.status.word == "estimated"
    assert [p.needed.status for p in found.probes] == [OK] * 3
    # Each is found to 0.02 dB, and a decibel takes a tenth more noise or so.
    assert found.noise_std == pytest.approx(seen.noise_std, rel=5e-3)


def test_pixels_that_a_stride_skips_may_be_enough() -> None:
    # Each off by a half: 12.3 dB at best.
    x, y = images_for_it(0.0), torch.arange(3)
    found = leakwatch.recommend_noise(strided(), x, y, target_psnr=20.0, check=0)
    for probe in found.probes:
        assert probe.needed.status.word == "estimated"
        assert "at most" in probe.needed.status.reason
    # With other pixels there the same takes more than 1e-2.
    assert 0 <= found.noise_std < 1e-6


def test_progress_is_told_after_each_round() -> None:
    x, y = samples()
    said: list[str] = []
    found = leakwatch.recommend_noise(
        network(), x, y, target_psnr=TARGET, check=1, progress=said.append
    )
    assert said[0].startswith("predicted for 6 probes: noise_std = ")
    assert said[0].endswith("; attacks on 1")
    best = max(c.psnr for c in found.checks if c.conclusive)
    assert said[-1].startswith(f"round {len(said) - 1}, noise_std = ")
    assert said[-1].endswith(f"2 of 2 attacks matched, the best at {best:.1f} dB")


def test_a_sample_that_stays_below_the_target_says_so() -> None:
    # Of its unseen pixels natural images tell little.
    x, y = images_for_it(0.0), torch.arange(3)
    found = leakwatch.recommend_noise(
        strided(), x, y, target_psnr=20.0, check=0, prior="natural"
    )
    for probe in found.probes:
        assert probe.psnr.number < 19.0
        assert probe.needed.status.word == "estimated"
        assert "at most" in probe.needed.status.reason


def spectrum(
    needed: float, monkeypatch: pytest.MonkeyPatch, table: dict[int, Value]
) -> NoiseResponse:
    made = NoiseResponse(None, Settings(), OK)
    lost = Value.without("unresolved", "too small to tell")
    table[id(made)] = lost if math.isnan(needed) else Value(needed)
    monkeypatch.setattr(NoiseResponse, "noise_for", lambda s, target: table[id(s)])
    return made


def test_unresolved_probes_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict[int, Value] = {}
    spectra = [spectrum(v, monkeypatch, table) for v in (0.1, math.nan, 0.4, 0.2, 0.3)]
    whole = enough(spectra, 20.0, 1.0)
    assert math.isnan(whole.noise_std)
    assert whole.status.word == "unresolved"
    assert "1 of 5 probes" in whole.status.reason
    assert whole.held == ()
    assert whole.order[:2] == (1, 2)
    most = enough(spectra, 20.0, 0.8)
    assert most.noise_std == 0.4
    assert most.held == (2, 4, 3, 0)


def test_the_check_attacks_the_worst_with_the_noise() -> None:
    x, y = samples()
    found = leakwatch.recommend_noise(
        network(), x, y, target_psnr=TARGET, check=2, index=range(50, 56)
    )
    assert found.status.usable
    # Which two ask for most may change with the target that a check has lowered.
    worst = {p.sample for p in found.probes[:3]}
    assert len({c.sample for c in found.checks}) == 2
    assert {c.sample for c in found.checks} <= worst
    assert [c.box for c in found.checks] == [False, False, True, True]
    assert all(c.conclusive for c in found.checks)
    assert all(c.psnr <= TARGET + 0.5 for c in found.checks)
    assert found.noise_std >= found.predicted
    for c in found.checks:
        image = x[c.sample - 50]
        blank = -10 * math.log10(float((image - 0.5).square().mean()))
        assert c.mean_image == pytest.approx(blank, abs=1e-4)
        assert c.predicted <= TARGET + 1e-9
    assert f"noise_std = {found.noise_std:.3g}"[:15] in str(found)
    assert found.aim <= TARGET - 1
    assert f"predictions are held at {found.aim:.1f} dB" in str(found)


def attacks(
    monkeypatch: pytest.MonkeyPatch, achieved: list[float], conclusive: bool = True
) -> list[float]:
    """Replaces the attack; returns the noises that it is asked about."""
    asked: list[float] = []

    def run(self: CheckAttack, places: object, noise_std: float) -> tuple[Check, ...]:
        asked.append(noise_std)
        psnr = achieved[min(len(asked), len(achieved)) - 1]
        return (Check(7, True, psnr, TARGET, 9.0, conclusive),)

    monkeypatch.setattr(CheckAttack, "run", run)
    return asked


def test_more_noise_where_the_attack_comes_above(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = samples()
    asked = attacks(monkeypatch, [TARGET + 2, TARGET + 0.4])
    found = leakwatch.recommend_noise(network(), x, y, target_psnr=TARGET)
    assert found.status.word == "estimated"
    assert "times what was predicted" in found.status.reason
    assert asked == [found.predicted, found.noise_std]
    # A decibel below the target at first, and then by as much as the attack was above.
    assert predicted(found.noise_std)[0] == pytest.approx(TARGET - 3, abs=0.2)
    assert found.aim == pytest.approx(TARGET - 3)
    alone = leakwatch.recommend_noise(network(), x, y, target_psnr=TARGET, check=0)
    assert alone.aim == TARGET
    assert "are held at" not in str(alone)


def test_an_attack_that_is_never_held_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = samples()
    asked = attacks(monkeypatch, [TARGET + 1])
    found = leakwatch.recommend_noise(network(), x, y, target_psnr=TARGET)
    assert len(asked) == 3
    assert math.isnan(found.noise_std)
    assert found.status.word == "failed"
    assert "reached 16.0 dB on sample 7" in found.status.reason
    assert found.predicted > 0


def test_an_attack_that_shows_nothing_is_no_confirmation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = samples()
    attacks(monkeypatch, [3.0], conclusive=False)
    found = leakwatch.recommend_noise(network(), x, y, target_psnr=TARGET)
    assert found.status.word == "estimated"
    assert "show nothing" in found.status.reason
    assert "did not match the gradient" in str(found)


def test_mistakes() -> None:
    x, y = samples()
    net = network()
    for match, more in (
        (r"share must lie in \(0, 1\], got 90", {"share": 90}),
        ("rounds must be at least 1, got 0", {"rounds": 0}),
        ("slack must be at least 0 and finite, got -1", {"slack": -1.0}),
        ("target_psnr must be finite, got inf", {"target_psnr": math.inf}),
    ):
        with pytest.raises(ValueError, match=match):
            leakwatch.recommend_noise(net, x, y, **more)
