"""Mixtures of samples in a trade-off: who finds what, and how it is shown."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakwatch import Status
from leakwatch.defenses import Defense, MixUp, Samples
from leakwatch.derivatives import GradientMap
from leakwatch.status import OK
from leakwatch.studies import Applied, Outcome, TradeOff, trade_off
from leakwatch.studies.trade_offs.attackers import plain, share
from leakwatch.studies.trade_offs.grid import named_mixtures
from leakwatch.studies.trade_offs.predictions import CEILING
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
    """The oracle all; who knows only the mean image, the best linear estimate."""
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
        mixed = ALPHA * x[row] + (1 - ALPHA) * partners[:, row].mean(0)
        shrunk = ALPHA / (ALPHA**2 + (1 - ALPHA) ** 2 / queries)
        best = mu + shrunk * (mixed - mu)
        expected = psnr(best.clamp(0, 1).double(), x[row])
        assert guess.psnr == pytest.approx(expected, abs=1e-3)
        left = R**2 / (1 + queries * (ALPHA / (1 - ALPHA)) ** 2)
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
    mixed = ALPHA * x[0] + (1 - ALPHA) * public[0][0]
    best = 0.5 + ALPHA / (ALPHA**2 + (1 - ALPHA) ** 2) * (mixed - 0.5)
    expected = psnr(best.clamp(0, 1).double(), x[0])
    assert outcomes["estimating"].psnr == pytest.approx(expected, abs=1e-3)
    left = R**2 / (1 + (ALPHA / (1 - ALPHA)) ** 2)
    predicted = -10 * math.log10(left)
    assert outcomes["estimating"].predicted == pytest.approx(predicted, abs=1e-9)


def test_who_does_not_know_takes_the_message_for_one_image() -> None:
    x, y = samples(1)
    at = Samples(GradientMap(network(), dtype=torch.float64), x.double(), y)
    answers = share(MixUp(ALPHA, public=others()), at, 0, 2)
    aim = plain(at, answers, 0)
    assert torch.equal(aim.truth, at.x)
    assert aim.observation.noise_std == 0.0
    torch.testing.assert_close(aim.observation.gradients(at.x, y), at.gradient)
    both = torch.cat([answer.gradient for answer in answers.each])
    torch.testing.assert_close(aim.observation.message, both.mean(0, keepdim=True))
    first = share(MixUp(ALPHA, public=others()), at, 0)
    assert torch.equal(first.mean.gradient, answers.each[0].gradient)


@pytest.mark.parametrize("knows", [True, False])
def test_mixtures_that_were_not_matched_are_left_out(knows: bool) -> None:
    x, y = others(1)  # far enough from the ends of the range
    attacking = attack_of(x, y)
    at = Samples(GradientMap(network(), dtype=torch.float64), x.double(), y)
    # Partners are the mean image: both attackers take it off.
    grey = torch.full((1, *x.shape[1:]), 0.5), torch.zeros(1, dtype=torch.long)
    answers = share(MixUp(ALPHA, public=grey), at, 0, 2)
    short = Status("not converged", "short")

    def judged(*found: tuple[Tensor, Status]) -> Outcome:
        mixed = [(ALPHA * x + (1 - ALPHA) * 0.5, status) for x, status in found]
        return attacking._unmixed(mixed, answers, 0, x, knows=knows)

    def expected(off: float, matched: int) -> float:
        best = ALPHA**2 / (ALPHA**2 + (1 - ALPHA) ** 2 / matched)
        return psnr((x + off).double() if knows else 0.5 + best * (x + off - 0.5), x)

    near, far = x + 0.01, torch.ones_like(x)
    one = judged((far, short), (near, OK))
    assert one.status.word == "estimated"
    assert "from 1 of 2" in one.status.reason
    assert one.psnr == pytest.approx(expected(0.01, 1), abs=1e-3)
    both = judged((x - 0.03, OK), (near, OK))
    assert both.status == OK
    assert both.psnr == pytest.approx(expected(-0.01, 2), abs=1e-3)
    assert judged((far, short), (far, short)).status == short


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
    found = [r.psnr["adaptive"] for r in measured.summary[2:]]
    assert min(found) > 100
    assert list(drawn["mixup"].y) == [60.0, 60.0]
    assert "60 dB: or more" in measured.figure().layout.title.subtitle.text
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
        (r"mixup must lie in \(0, 1\), got 1.0", {"mixup": [1.0]}),
        (r"mixup must lie in \(0, 1\), got 0.0", {"mixup": [0.0]}),
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
