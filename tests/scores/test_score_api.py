"""Arguments of score(), and that samples don't influence each other."""

from __future__ import annotations

import math

import pytest
import torch
from score_problems import CASES, Case
from torch import Tensor, nn
from torch.nn import functional as F

from leakwatch.derivatives import GradientMap
from leakwatch.scores import (
    SampleSpectrum,
    Score,
    ScoreInputs,
    Scoring,
    Settings,
    Value,
    available,
    register,
    resolve,
    score,
)

Small = tuple[nn.Module, Tensor, Tensor]
ALL = available()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"scores": "lavpp"},
            r"'lavpp'; did you mean 'lavp'\? choose from groups bayes, i2f",
        ),
        ({"scores": ["lavp", 3]}, r"unknown score 3; choose from"),
        ({"scores": []}, r"no score asked for; choose from"),
        ({"noise_std": None}, r"i2f_psnr, .* need noise_std, .*noise_std=1e-2"),
        ({"solver": "qr"}, r"solver must be one of \('auto', .*\), got 'qr'"),
        ({"epsilon": -1.0}, r"epsilon must be at least 0 and finite, got -1"),
        ({"epsilon": math.nan}, r"epsilon must be at least 0 and finite, got nan"),
        ({"noise_std": 0.0}, r"noise_std must be positive and finite, got 0"),
        ({"prior_std": -0.1}, r"prior_std must be positive and finite, got -0.1"),
        ({"data_range": math.inf}, r"data_range must be positive and finite, got inf"),
        ({"max_memory": 0}, r"max_memory must be positive and finite, got 0"),
        ({"target_psnr": math.nan}, r"target_psnr must be finite, got nan"),
        ({"mean": (0.5,)}, r"describe one normalisation; give both"),
        ({"std": (0.5,)}, r"describe one normalisation; give both"),
        (
            {"mean": (0.5,) * 3, "std": (0.5,) * 3},
            r"3 entries, one per channel, but dimension 1 .* has 1;",
        ),
        ({"mean": (0.5,), "std": (0.0,)}, r"std must be positive, got \[0"),
        ({"mean": (math.nan,), "std": (1.0,)}, r"mean must be finite, got \(nan"),
        (
            {"prior_mean": torch.zeros(64)},
            r"prior_mean must be finite and have the shape of one sample, \(1, 8, 8\), "
            r"got \(64,\)",
        ),
        ({"prior_mean": torch.full((1, 8, 8), math.nan)}, r"prior_mean must be finite"),
        ({"prior": torch.eye(3)}, r"matrix of shape \(64, 64\), for samples of 64"),
        ({"prior": torch.ones(64)}, r"matrix of shape \(64, 64\), .*got shape"),
        ({"prior": -torch.eye(64)}, r"must be positive definite"),
        ({"prior": torch.ones(64, 64).triu()}, r"must be symmetric"),
        ({"prior": torch.eye(64) * math.inf}, r"must be finite"),
        ({"delta": torch.zeros(5, 3)}, r"\(batch, d_θ\) = \(5, 1510\), got \(5, 3\)"),
        ({"delta": torch.full((5, 1510), math.nan)}, r"delta must be finite"),
        ({"delta": torch.zeros(5, 1510).long()}, r"floating point perturbation"),
        ({"dtype": torch.float16}, r"float32 or torch.float64, got torch.float16"),
    ],
)
def test_bad_arguments(small: Small, options: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"scores": ["lavp", "i2f"], "noise_std": 1e-2}
    with pytest.raises(ValueError, match=message):
        score(*small, **(arguments | options))


def test_bad_samples(small: Small) -> None:
    net, x, y = small
    with pytest.raises(ValueError, match="floating point"):
        score(net, (255 * x).to(torch.uint8), y, "lavp")
    with pytest.raises(ValueError, match="label 10 of sample 2 is outside"):
        score(net, x, torch.tensor([0, 1, 10, 2, 3]), "lavp")
    with pytest.raises(ValueError, match="one label per sample"):
        score(net, x, y[:4], "lavp")
    dark = x.clone()
    dark[4] = math.nan
    with pytest.raises(ValueError, match="sample 4 holds NaN"):
        score(net, dark, y, "lavp")
    with pytest.raises(ValueError, match="at least one sample"):
        score(net, x[:0], y[:0], "lavp")
    with pytest.raises(ValueError, match="batch is empty"):
        Scoring(resolve("lavp")).evaluate(
            ScoreInputs(GradientMap(net), x[:0], y[:0]), Settings()
        )


def test_evaluate_checks_what_it_was_given(small: Small) -> None:
    net, x, y = small
    with pytest.raises(ValueError, match="need noise_std"):
        Scoring(resolve("i2f")).evaluate(
            ScoreInputs(GradientMap(net), x, y), Settings()
        )


def test_the_module_is_left_as_it_was(small: Small) -> None:
    net, x, y = small
    net.train()
    before = {name: p.clone() for name, p in net.state_dict().items()}
    state = torch.get_rng_state()
    score(net, x, y, ALL, noise_std=1e-2)
    assert net.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in net.parameters())
    for name, p in net.state_dict().items():
        assert torch.equal(p, before[name])
        assert p.dtype == torch.float32


@pytest.mark.parametrize(
    ("case", "solver"),
    [(case, "exact") for case in CASES]
    + [(CASES[0], "lanczos"), (CASES[3], "lanczos")],
    ids=lambda given: getattr(given, "name", given),
)
def test_a_sample_alone_and_in_a_batch(case: Case, solver: str) -> None:
    names, rtol = (
        (ALL, 1e-12) if solver == "exact" else (["lavp_l2_max", "lavp_cos_max"], 1e-6)
    )
    net, (x, y) = case.make(), case.data(3)
    options = {"noise_std": 1e-2, "solver": solver, "dtype": torch.float64}
    together = score(net, x, y, names, **options)
    alone = score(net, x[2:], y[2:], names, **options)
    for name in names:
        # The smallest eigenvalues themselves have fewer digits than that.
        tolerance = max(rtol, 1e-10) if "min" in name or "fusion" in name else rtol
        torch.testing.assert_close(
            alone[name][0], together[name][2], rtol=tolerance, atol=0
        )
        assert alone.status[name][0].word == together.status[name][2].word
        assert together.status[name][2].word == "ok"


def test_place_and_group_of_a_sample_make_no_difference(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"noise_std": 1e-2, "dtype": torch.float64}
    delta = 1e-2 * torch.randn(5, 1510).double()
    whole = score(*small, ALL, delta=delta, **options)
    monkeypatch.setattr("leakwatch.scores.batches._GROUP_BYTES", 8 * 1510 * 2)
    parts = score(*small, ALL, delta=delta, **options)
    for name in ALL:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-12, atol=0)
        assert parts.status[name] == whole.status[name]
    estimates = ["jacobian_norm"]
    net, (x, y) = small[0], (t[:3] for t in small[1:])
    forwards = score(net, x, y, estimates, dtype=torch.float64)
    backwards = score(net, x.flip(0), y.flip(0), estimates, dtype=torch.float64)
    for name in estimates:
        torch.testing.assert_close(
            backwards[name].flip(0), forwards[name], rtol=1e-10, atol=0
        )


def test_samples_that_are_single_numbers() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, 3), nn.Tanh()).double()
    x, y = torch.rand(2).double(), torch.tensor([0, 2])
    found = score(net, x, y, ["lavp_l2_max", "i2f_bayes"], noise_std=0.1)
    assert found.usable("i2f_bayes").all()
    for i in range(2):
        leaf = x[i].clone().requires_grad_()
        loss = F.cross_entropy(net(leaf[None]), y[i : i + 1])
        parts = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        g = torch.cat([p.reshape(-1) for p in parts])
        j = torch.stack([torch.autograd.grad(e, leaf, retain_graph=True)[0] for e in g])
        expected = float(j.square().sum())
        assert float(found["lavp_l2_max"][i]) == pytest.approx(expected, rel=1e-6)


def test_result_is_a_mapping(small: Small) -> None:
    result = score(*small, ["grad_norm", "lavp"])
    assert next(iter(result)) == "grad_norm"
    assert len(result) == 6
    assert "i2f" not in result
    assert result["lavp_l2_max"].shape == (5,)
    assert result["lavp_l2_max"].dtype == torch.float64
    assert result.usable("lavp_l2_max").tolist() == [True] * 5
    assert str(result.status["lavp_l2_max"][0]) == "ok"
    assert result.seconds > 0
    for ask in (result.__getitem__, result.usable):
        with pytest.raises(
            KeyError, match="no score 'i2f' in this result; it holds gr"
        ):
            ask("i2f")


def condition(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """λ_1/λ_min: a score that leakwatch does not have."""
    worse = min(
        (spectrum.lambda_max, spectrum.lambda_min), key=lambda v: v.status.usable
    )
    return Value(spectrum.lambda_max.number / spectrum.lambda_min.number, worse.status)


def own(name: str = "condition", compute=condition) -> Score:  # type: ignore[no-untyped-def]
    return Score(
        name=name,
        compute=compute,
        needs=frozenset({"lambda_max", "lambda_min"}),
        unit="1",
        direction="higher = less exposed",
        meaning="Condition of the matching problem.",
        source="this test",
    )


@pytest.mark.usefixtures("own_registry")
def test_a_score_of_ones_own(small: Small) -> None:
    register(own(), "mine")
    result = score(*small, ["mine", "lavp"], dtype=torch.float64)
    expected = result["lavp_l2_max"] / result["lavp_l2_min"]
    torch.testing.assert_close(result["condition"], expected)
    assert result.status["condition"][0].word == "ok"
    unregistered = score(*small, own("other"), dtype=torch.float64)
    torch.testing.assert_close(unregistered["other"], expected)


def test_a_score_that_misbehaves_spoils_only_itself(
    small: Small, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(spectrum: SampleSpectrum, settings: Settings) -> Value:
        raise KeyError("oh")

    def infinite(spectrum: SampleSpectrum, settings: Settings) -> Value:
        return Value(math.inf)

    scores = [own("broken", broken), own("infinite", infinite), "lavp_l2_max"]
    result = score(*small, scores)
    assert result.status["broken"][0].word == "failed"
    assert result.status["broken"][0].reason.startswith("KeyError: 'oh' (test_score_")
    assert "leakwatch could not compute broken" in caplog.text
    assert result.status["infinite"][0].word == "failed"
    assert "inf" in result.status["infinite"][0].reason
    assert result["infinite"].isnan().all()
    assert result.status["lavp_l2_max"][0].word == "ok"
