"""One Gram matrix for everything, and which solver is chosen why."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from leakwatch import GradientJacobian
from leakwatch.scores import available, score

Small = tuple[nn.Module, Tensor, Tensor]
ALL = available()
# Where noise moves the image far, predictions look at other images too.
ONCE = [name for name in ALL if name != "noise_std_for_range_psnr"]


@pytest.fixture
def grams(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions for which a Gram matrix was formed."""
    seen: list[int] = []
    original = GradientJacobian.gram

    def counted(self: GradientJacobian, sample: int, **options):  # type: ignore[no-untyped-def]
        seen.append(sample)
        return original(self, sample, **options)

    monkeypatch.setattr(GradientJacobian, "gram", counted)
    return seen


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Products with J and Jᵀ that were taken outside of a Gram matrix."""
    seen: list[str] = []
    for name in (
        "matvec",
        "rmatvec",
        "normalized_rmatvec",
        "normalized_pulls",
        "normal",
    ):
        original = getattr(GradientJacobian, name)

        def counted(self, *args, name=name, original=original, **options):  # type: ignore[no-untyped-def]
            seen.append(name)
            return original(self, *args, **options)

        monkeypatch.setattr(GradientJacobian, name, counted)
    return seen


@pytest.mark.parametrize(
    ("scores", "drawn"),
    [
        (ONCE, True),
        (["lavp_l2_min"], False),
        (["i2f_bayes", "lavp"], False),
        (["i2f"], True),
    ],
)
def test_one_gram_per_sample_whatever_is_asked(
    small: Small, grams: list[int], products: list[str], scores: list[str], drawn: bool
) -> None:
    """And noise is drawn, at once, only for who asks what the range changes."""
    result = score(*small, scores, noise_std=1e-5)
    assert grams == [0, 1, 2, 3, 4]
    assert products == (["normalized_pulls"] if drawn else [])
    assert (result.solver, result.reason) == (
        "exact",
        "one Gram matrix serves all scores",
    )


def test_a_perturbation_costs_one_product_more(
    small: Small, grams: list[int], products: list[str]
) -> None:
    delta = torch.full((5, 1510), 1e-3)
    score(*small, ONCE, noise_std=1e-2, delta=delta, prior=torch.eye(64))
    assert grams == [0, 1, 2, 3, 4]
    assert sorted(products) == ["normalized_pulls", "normalized_rmatvec"]


@pytest.mark.parametrize("scores", [["loss", "grad_norm"], "norms", ["lavp_l2_max"]])
def test_auto_takes_products_when_they_do(
    small: Small, grams: list[int], products: list[str], scores: object
) -> None:
    result = score(*small, scores)
    assert result.solver == "lanczos"
    assert grams == []
    if scores == ["loss", "grad_norm"]:
        assert products == []
        assert result.reason == "no score needs the Jacobian"
    else:
        assert result.reason == "nothing needs more than λ_1 and the trace"


def test_max_memory_forces_lanczos_and_says_so(small: Small, grams: list[int]) -> None:
    result = score(*small, ["lavp_l2_max", "i2f"], noise_std=1e-2, max_memory=0.01)
    assert result.solver == "lanczos"
    assert "MiB, more than max_memory=0.01 MiB" in result.reason
    assert result.status["i2f"][0].word == "estimated"
    assert result.status["lavp_l2_max"][0].word == "ok"
    assert grams == []
    forced = score(*small, ["lavp_l2_min"], solver="exact", max_memory=0.01)
    assert (forced.solver, forced.reason) == ("exact", "as asked")
    assert grams == [0, 1, 2, 3, 4]


def test_a_large_input_takes_lanczos() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4097, 2), nn.Tanh(), nn.Linear(2, 2))
    result = score(net, torch.rand(1, 4097), torch.tensor([1]), ["lavp"], products=30)
    assert result.solver == "lanczos"
    assert "4097 input elements are more than the 4096" in result.reason
    assert result.status["lavp_l2_max"][0].word == "ok"
    # Nearly all directions meet the first layer alone, by its gradient's length.
    assert result.status["lavp_l2_min"][0].word == "ok"
