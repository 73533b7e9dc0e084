"""Scores from products alone: never better than they say."""

from __future__ import annotations

import math

import pytest
import torch
from score_problems import CASES, Case
from torch import Tensor, nn

from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.graph_products.batch_products import BatchProducts
from leakwatch.derivatives.jacobian import GradientJacobian
from leakwatch.priors import DensePrior
from leakwatch.scores import ScoreResult, available, score

ALL = available()
NOISE = 3e-3
SUMS = ("i2f", "i2f_bayes", "leaked_bits", "noise_std_for_psnr", "jacobian_norm")
BY_NAME = {case.name: case for case in CASES}


def both(case: Case, **options: object) -> tuple[ScoreResult, ScoreResult]:
    """Exact in float64, and from products."""
    net, (x, y) = case.make(), case.data(1)
    common = {"noise_std": NOISE, "dtype": torch.float64, "target_psnr": 25.0}
    products = options.pop("products", 100)
    dtype = options.pop("products_dtype", torch.float64)
    exact = score(net, x, y, ALL, solver="exact", **{**common, **options})
    common = {**common, "dtype": dtype, "products": products}
    return exact, score(net, x, y, ALL, solver="lanczos", **{**common, **options})


def assert_honest(exact: ScoreResult, found: ScoreResult) -> None:
    """What is "ok" is right to 10 %, what is "estimated" within its errors."""
    for name in ALL:
        for i, status in enumerate(found.status[name]):
            number, truth = float(found[name][i]), float(exact[name][i])
            assert not math.isinf(number)
            assert (status.reason == "") == (status.word == "ok"), (name, status)
            if status.word == "ok":
                assert number == pytest.approx(truth, rel=0.1), name
            if status.word == "estimated":
                assert number == pytest.approx(truth, rel=allowed(status.reason)), name


def allowed(reason: str) -> float:
    """Four standard errors and all bounds that a reason states, as a fraction."""
    percent = 0.0
    for part in reason.replace(";", ",").split(","):
        words = part.split()
        if "standard error" in part:
            percent += 4 * float(words[words.index("error") + 1])
        elif "within" in words and words[-1] == "%":
            percent += float(words[words.index("within") + 1])
    return max(percent / 100, 0.1) if percent else 1.0


def test_expected_scores_and_ends() -> None:
    exact, found = both(BY_NAME["resnet"])
    assert found.solver == "lanczos"
    assert found.eigenvalues is None
    assert_honest(exact, found)
    for score_name in ("lavp_l2_max", "lavp_cos_max", "fisher_information_loss"):
        assert found.status[score_name][0].word == "ok"
        torch.testing.assert_close(
            found[score_name], exact[score_name], rtol=1e-8, atol=0
        )
    for score_name in SUMS:
        assert found.status[score_name][0].word == "estimated"
        assert "standard error" in found.status[score_name][0].reason
    for score_name in ("lavp_l2_min", "lavp_cos_min", "lavp_fusion"):
        assert bool(found.usable(score_name).all()), found.status[score_name]
        torch.testing.assert_close(
            found[score_name], exact[score_name], rtol=1e-2, atol=0
        )


@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_a_given_perturbation_from_one_space_each(epsilon: float) -> None:
    case = BY_NAME["mlp"]
    size = GradientMap(case.make()).size
    generator = torch.Generator().manual_seed(7)
    delta = NOISE * torch.randn(1, size, generator=generator, dtype=torch.float64)
    mean = torch.full(case.shape, 0.4)
    exact, found = both(
        case,
        delta=delta,
        epsilon=epsilon,
        prior_mean=mean,
        products_dtype=torch.float32,
    )
    assert_honest(exact, found)
    for name in ("i2f", "i2f_psnr", "i2f_bayes", "i2f_bayes_psnr", "i2f_lb", "i2f_nom"):
        assert found.status[name][0].word == "ok", found.status[name]
        torch.testing.assert_close(found[name], exact[name], rtol=2e-3, atol=0)


def test_too_few_products_are_never_ok() -> None:
    exact, found = both(BY_NAME["resnet"], products=10)
    assert_honest(exact, found)
    for name in ("lavp_l2_min", "lavp_cos_min", "i2f"):
        assert found.status[name][0].word == "not converged", found.status[name]
    assert float(found["lavp_l2_min"][0]) >= float(exact["lavp_l2_min"][0])
    assert float(found["lavp_cos_min"][0]) >= float(exact["lavp_cos_min"][0])
    assert "between 0 and 1 times this" in found.status["lavp_l2_min"][0].reason


def test_pixel_units_and_confident_samples() -> None:
    """Losses of 1e-20: J̃ is of moderate size, but J is not."""
    case = BY_NAME["mlp"]
    net = case.make()
    with torch.no_grad():
        net[3].bias[2] += 47.0
    x, y = case.data(1)[0], torch.tensor([2])
    common = {"noise_std": 1e-22, "std": (0.25,), "mean": (0.0,)}
    names = ["lavp", "i2f", "bayes"]
    exact = score(net, x, y, names, dtype=torch.float64, solver="exact", **common)
    found = score(net, x, y, names, solver="lanczos", **common)
    assert 0 < float(exact["lavp_l2_max"]) < 1e-37
    # Of H itself, which products don't give.
    assert found.status["i2f_range_psnr"][0].word == "not computed"
    for name in [n for n in found if n != "i2f_range_psnr"]:
        status = found.status[name][0]
        assert status.usable, (name, status)
        rel = 1e-2 if status.word == "ok" else allowed(status.reason)
        assert float(found[name]) == pytest.approx(float(exact[name]), rel=rel, abs=0)


BAYES = ["i2f_bayes", "i2f_bayes_psnr", "leaked_bits", "noise_std_for_psnr"]


def smooth_prior(d_x: int) -> DensePrior:
    place = torch.arange(d_x, dtype=torch.float64)
    near = torch.exp(-(place[:, None] - place).abs() / 4)
    covariance = 0.05 * near + 1e-4 * torch.eye(d_x)
    return DensePrior(torch.full((1, 8, 8), 0.5), covariance)


@pytest.mark.parametrize("memory", [2048, 1e-6], ids=["tangents", "products"])
def test_all_components_of_a_prior_are_the_whole_of_it(memory: float) -> None:
    case, prior = BY_NAME["mlp"], smooth_prior(64)
    net, (x, y) = case.make(), case.data(2)
    common = {"noise_std": NOISE, "dtype": torch.float64, "prior": prior}
    exact = score(net, x, y, BAYES, solver="exact", **common)
    found = score(net, x, y, BAYES, solver="lanczos", max_memory=memory, **common)
    for name in BAYES:
        assert [s.word for s in found.status[name]] == ["ok", "ok"]
        assert torch.allclose(found[name], exact[name], rtol=1e-7, atol=0), name


def test_some_components_of_a_prior_are_a_bound_and_say_so() -> None:
    case, prior = BY_NAME["mlp"], smooth_prior(64)
    net, (x, y) = case.make(), case.data(2)
    common = {"noise_std": NOISE, "dtype": torch.float64, "prior": prior}
    exact = score(net, x, y, BAYES, solver="exact", **common)
    found = score(net, x, y, BAYES, solver="lanczos", products=5, **common)
    rows = prior.leading(15)
    rest = float(prior.covariance.diagonal().sum() - rows.square().sum())
    jacobian = GradientJacobian(GradientMap(net, dtype=torch.float64), x, y)
    for i in range(2):
        j = jacobian.dense(i) @ rows.T
        m = torch.eye(15).double() + j.T @ j / NOISE**2
        seen = float(torch.linalg.solve(m, rows @ rows.T).diagonal().sum())
        # The others hide a little of what the components show.
        assert math.sqrt(seen + rest) <= float(found["i2f_bayes"][i])
        assert float(found["i2f_bayes"][i]) <= 1.1 * math.sqrt(seen + rest)
        status = found.status["i2f_bayes_psnr"][i]
        assert status.word == "estimated"
        assert "from 15 of 64 components" in status.reason
    assert bool((found["i2f_bayes_psnr"] <= exact["i2f_bayes_psnr"]).all())
    assert bool((found["leaked_bits"] <= exact["leaked_bits"]).all())


def test_no_noise_is_enough_where_unseen_detail_may_be_above_the_target() -> None:
    case, prior = BY_NAME["mlp"], smooth_prior(64)
    net, (x, y) = case.make(), case.data(1)
    found = score(
        net, x, y, BAYES, noise_std=NOISE, prior=prior, solver="lanczos", products=1,
        target_psnr=25.0,
    )  # fmt: skip
    # Three components leave more than 25 dB allow.
    assert found.status["noise_std_for_psnr"][0].word == "not converged"


def test_products_are_counted_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends, sums and their bounds stay within what was allowed."""
    seen: list[int] = []
    original = BatchProducts.push

    def counted(self: BatchProducts, v: Tensor, rows: Tensor | None = None) -> Tensor:
        seen.append(len(v))
        return original(self, v, rows)

    monkeypatch.setattr(BatchProducts, "push", counted)
    case = BY_NAME["mlp"]
    net, (x, y) = case.make(), case.data(1)
    for names, most in ((["lavp_l2_max"], 21), (["lavp_l2_min"], 21), (["i2f"], 42)):
        seen.clear()
        score(net, x, y, names, noise_std=NOISE, solver="lanczos", products=20)
        assert 0 < sum(seen) <= most, names
    with pytest.raises(ValueError, match="products must be positive"):
        score(net, x, y, "lavp", products=0)


def test_large_inputs_have_bayesian_scores() -> None:
    """What the whole spectrum can't be had for: 3×40×40, and a noise that is stated."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, 4, 1), nn.Sigmoid(), nn.Flatten(), nn.Linear(400, 5)
    )
    x, y = torch.rand(1, 3, 40, 40), torch.tensor([1])
    found = score(
        net, x, y, ["i2f_bayes", "lavp_l2_max", "i2f"], noise_std=1e-2, products=30
    )
    assert found.solver == "lanczos"
    assert found.status["lavp_l2_max"][0].word == "ok"
    assert found.status["i2f_bayes"][0].word == "estimated"
    assert not found.usable("i2f").any()
    assert 0 < float(found["i2f_bayes"]) <= math.sqrt(x.numel() / 12)
