"""Mixtures of samples in a trade-off: who finds what, and how it is shown."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakwatch.defenses import Defense, MixUp, Samples
from leakwatch.gradients import GradientMap
from leakwatch.status import OK, Status
from leakwatch.studies import Applied, TradeOff, trade_off
from leakwatch.studies.trade_off_grid import named_mixtures
from leakwatch.studies.trade_off_knowledge import plain, share
from leakwatch.studies.trade_off_prediction import CEILING
from studies.problems import FAST, attack_of, network, samples

ALL = ("naive", "estimating", "adaptive")
ALPHA, R = 0.7, 0.3


def others(n: int = 5) -> tuple[Tensor, Tensor]:
    """Images that nobody attacks, in the middle of the range."""
    stream = torch.Generator().manual_seed(7)
    return 0.4 + 0.2 * torch.rand(n, 1, 2, 3, generator=stream), torch.arange(n) % 3


def psnr(found: Tensor, x: Tensor) -> float:
    return float(-10 * (found - x).square().mean().log10())


@pytest.mark.parametrize("queries", [1, 3])
def test_what_each_attacker_finds(queries: int) -> None:
    """The oracle all; who takes the mean image off, what the partners are beside it."""
    x, y = samples(2)
    net = network(hidden=20).double()
    defense = MixUp(ALPHA, public=others())
    mu = torch.full((1, 2, 3), 0.45)
    attacking = attack_of(
        x,
        y,
        attackers=ALL,
        queries=queries,
        engine=FAST.changed(prior_mean=None),
        prior_mean=mu,
        prior_std=R,
    )
    got = attacking.run(net, defense, 0)
    at = Samples(GradientMap(net, dtype=torch.float64), x.double(), y)
    answers = share(defense, at, 0, queries)
    partners = torch.stack([a.knowledge.mixing.partner for a in answers.each])  # type: ignore[union-attr]
    for row, attacked in enumerate(got):
        oracle, guess = (attacked.outcomes[who] for who in ("adaptive", "estimating"))
        assert oracle.status == guess.status == OK
        assert oracle.psnr > 100
        assert oracle.predicted == CEILING
        off = (1 - ALPHA) / ALPHA * (partners[:, row].mean(0) - mu)
        expected = psnr((x[row] + off).clamp(0, 1).double(), x[row])
        assert guess.psnr == pytest.approx(expected, abs=1e-3)
        left = ((1 - ALPHA) / ALPHA * R) ** 2 / queries
        assert guess.predicted == pytest.approx(-10 * math.log10(left), abs=1e-9)
        naive = attacked.outcomes["naive"]
        assert not naive.status.usable or naive.psnr < guess.psnr
        deltas = torch.stack([a.delta[row].norm() for a in answers.each])
        size = float(deltas.square().mean().sqrt())
        assert attacked.delta_norm == pytest.approx(size)


def test_mixtures_are_judged_as_mixtures_and_images_in_pixels() -> None:
    """With normalised inputs: the same mixtures, and the same errors in pixels."""
    x, y = samples(1)
    public = others(1)
    mean, std = (0.4,), (0.25,)
    net = network(hidden=20).double()
    defense = MixUp(ALPHA, public=((public[0] - 0.4) / 0.25, public[1]))
    attacking = attack_of(
        (x - 0.4) / 0.25,
        y,
        attackers=("estimating", "adaptive"),
        mean=mean,
        std=std,
        prior_std=R,
    )
    outcomes = attacking.run(net, defense, 0)[0].outcomes
    assert outcomes["adaptive"].psnr > 100
    off = (1 - ALPHA) / ALPHA * (public[0][0] - 0.5)
    expected = psnr((x[0] + off).clamp(0, 1).double(), x[0])
    assert outcomes["estimating"].psnr == pytest.approx(expected, abs=1e-3)
    left = ((1 - ALPHA) / ALPHA * R) ** 2
    predicted = -10 * math.log10(left)
    assert outcomes["estimating"].predicted == pytest.approx(predicted, abs=1e-9)


def test_who_does_not_know_takes_the_message_for_one_image() -> None:
    x, y = samples(1)
    at = Samples(GradientMap(network(), dtype=torch.float64), x.double(), y)
    answers = share(MixUp(ALPHA, public=others()), at, 0, 2)
    aim = plain(at, answers, 0)
    assert torch.equal(aim.truth, at.x)
    assert aim.given.noise_std == 0.0
    torch.testing.assert_close(aim.given.gradients(at.x, y), at.gradient)
    both = torch.cat([answer.gradient for answer in answers.each])
    torch.testing.assert_close(aim.given.message, both.mean(0, keepdim=True))
    first = share(MixUp(ALPHA, public=others()), at, 0)
    assert torch.equal(first.mean.gradient, answers.each[0].gradient)


def test_what_was_not_matched_is_left_out_of_the_mean() -> None:
    x, y = others(1)  # far enough from the ends of the range
    attacking = attack_of(x, y)
    short = Status("not converged", "short")
    near, far = x + 0.01, torch.ones_like(x)
    one = attacking._judged([(far, short), (near, OK)], x)
    assert one.status.word == "estimated"
    assert "mean of 1 of 2" in one.status.reason
    assert one.psnr == pytest.approx(40, abs=1e-3)
    both = attacking._judged([(x - 0.03, OK), (near, OK)], x)
    assert both.status == OK
    assert both.psnr == pytest.approx(40, abs=1e-3)
    assert attacking._judged([(far, short)] * 2, x).status == short


def training(net: nn.Module, defense: Defense | None, seed: int) -> Applied | None:
    """One step on what the batch shares."""
    x, y = samples(4)
    mine = Samples(GradientMap(net, dtype=torch.float64), x.double(), y)
    step, relative = mine.gradient.mean(0), 0.0
    if defense is not None:
        stream = torch.Generator().manual_seed(seed)
        made = defense.protect_batch(mine.gradient, generator=stream, samples=mine)
        relative = float((made.gradient[0] - step).norm() / step.norm())
        step = made.gradient[0]
    start = 0
    with torch.no_grad():
        for p in net.parameters():
            p -= 0.1 * step[start : start + p.numel()].view_as(p).to(p)
            start += p.numel()
    return None if defense is None else Applied(1, 0.0, 0.0, relative)


@pytest.fixture(scope="module")
def measured() -> TradeOff:
    x, y = samples(1)
    return trade_off(
        network(),
        x,
        y,
        training,
        lambda _: 0.5,
        defenses=["gaussian"],
        budgets=[0.3],
        mixup=[0.6, 0.9],
        partners=others(),
        attack=FAST,
        steps=15,
        start="near",
        attackers=["estimating", "adaptive"],
        queries=2,
    )


def test_rows_have_coefficients_in_place_of_budgets(
    measured: TradeOff, tmp_path: Path
) -> None:
    assert measured.defenses == ("none", "gaussian", "mixup")
    places = [(r.defense, r.coefficient, r.budget) for r in measured.summary]
    assert places[:2] == [("none", None, 0.0), ("gaussian", None, 0.3)]
    assert [p[:2] for p in places[2:]] == [("mixup", 0.9), ("mixup", 0.6)]
    assert all(math.isnan(p[2]) for p in places[2:])
    most, least = measured.summary[2:]
    assert 0 < most.message_relative < least.message_relative
    assert 0 < most.training_relative < least.training_relative
    with measured.to_csv(tmp_path / "rows.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(r["budget"], r["coefficient"]) for r in lines] == [
        ("0.0", ""),
        ("0.3", ""),
        ("", "0.6"),
        ("", "0.9"),
    ]
    attacks = [s for s in measured.samples() if s["defense"] == "mixup"]
    assert {s["coefficient"] for s in attacks} == {0.6, 0.9}


def test_table_figure_and_report_name_them(measured: TradeOff, tmp_path: Path) -> None:
    table = measured.table()
    line = next(t for t in table.splitlines() if t.startswith("mixup α = 0.6"))
    assert line.removeprefix("mixup α = 0.6").split()[0] == "–"
    assert "training consumed" not in table
    assert "every message was asked for 2 times" in table
    drawn = {t.name: t for t in measured.figure().data if t.visible}
    assert [h.split("<br>")[0] for h in drawn["mixup"].customdata] == [
        "mixup α = 0.9",
        "mixup α = 0.6",
    ]
    assert list(drawn["mixup"].y) == [r.psnr["adaptive"] for r in measured.summary[2:]]
    page = measured.save(tmp_path).read_text()
    assert "mixup α = 0.9" in page
    assert "of mixtures one coefficient" in page
    assert "Each was asked for 2 times." in page


def test_only_mixtures() -> None:
    x, y = samples(1)
    found = trade_off(
        network(),
        x,
        y,
        lambda *_: None,
        lambda _: 0.5,
        defenses=[],
        mixup=[0.8],
        partners=others(),
        attack=FAST,
        attackers=["adaptive"],
    )
    assert [r.setting.words() for r in found.summary] == ["none", "mixup α = 0.8"]


@pytest.mark.parametrize(
    ("match", "changed"),
    [
        ("above 0 and below 1, got 1.0", {"mixup": [1.0]}),
        ("above 0 and below 1, got 0.0", {"mixup": [0.0]}),
        ("must be a list of coefficients", {"mixup": 0.5}),
        ("must be a list of coefficients", {"mixup": None}),
        (r"different coefficients, got \[0.5, 0.5\]", {"mixup": [0.5, 0.5]}),
        ("needs samples to mix with", {"mixup": [0.5], "partners": None}),
        (
            r"shape of the samples, \(1, 2, 3\)",
            {"partners": (torch.rand(2, 4), torch.tensor([0, 1]))},
        ),
        ("hold NaN or infinity", {"partners": (others()[0] / 0, others()[1])}),
        ("label", {"partners": (others()[0], others()[1] + 100)}),
        ("partner 1 is sample 0, which is attacked", {"partners": "attacked"}),
        ("'mixup' has no budget", {"defenses": ["mixup"]}),
        ("queries must be at least 1", {"queries": 0}),
    ],
)
def test_mistakes_are_said_before_anything_is_trained(
    match: str, changed: dict[str, Any]
) -> None:
    x, y = samples(2)

    def never(*_: object) -> None:
        raise AssertionError("trained")

    asked: dict[str, Any] = {"mixup": [0.5], "partners": others()} | changed
    if asked["partners"] == "attacked":
        asked["partners"] = (torch.cat([others(1)[0], x[:1]]), y)
    with pytest.raises(ValueError, match=match):
        trade_off(network(), x, y, never, lambda _: 0.5, **asked)


def test_partners_are_those_that_were_given() -> None:
    x, _ = samples(1)
    ((setting, defense),) = named_mixtures([0.25], others(), x)
    assert setting.key == ("mixup", -0.25)
    assert defense.coefficient == 0.25
    assert defense.public is not None
    assert torch.equal(defense.public[0], others()[0])
    assert named_mixtures([], None, x) == []
