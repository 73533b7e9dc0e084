from __future__ import annotations

import csv
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakwatch import Status
from leakwatch.attacks import FirstOrder
from leakwatch.defenses import (
    DPSGD,
    Budget,
    Defense,
    EigenNoise,
    GaussianNoise,
    PruningToBudget,
    Samples,
    Single,
    Smallest,
    predicted_errors,
    registered_defenses,
)
from leakwatch.derivatives import GradientMap
from leakwatch.status import OK
from leakwatch.studies import (
    Applied,
    Attacked,
    Cell,
    Outcome,
    TradeOff,
    TradeOffRow,
    trade_off,
)
from leakwatch.studies.trade_offs.attackers import informed, reimagined, share
from leakwatch.studies.trade_offs.grid import named_budgets, named_defenses
from leakwatch.studies.trade_offs.predictions import CEILING
from studies.problems import FAST, attack_of, network, samples

GRID: dict[str, Any] = {
    "defenses": ["gaussian", "pruning", "eigen-smallest"],
    "budgets": [0.0, 0.3],
    "directions": 2,
    "attack": FAST,
    "steps": 15,
    "start": "near",
}


def training(net: nn.Module, defense: Defense | None, seed: int) -> Applied | None:
    """Three steps of gradient descent on batches that the global stream draws."""
    x, y = samples(12)
    gradients = GradientMap(net, dtype=torch.float64)
    stream = torch.Generator().manual_seed(seed)
    asked = applied = relative = 0.0
    for _ in range(3):
        batch = torch.randint(len(x), (4,))
        mine = Samples(gradients, x[batch].double(), y[batch])
        step = mine.gradient.mean(0)
        if defense is not None:
            made = defense.protect_batch(mine.gradient, generator=stream, samples=mine)
            delta = made.gradient[0] - step
            step = made.gradient[0]
            asked += float(made.variance[0]) / 3
            applied += float(delta.square().sum()) / 3
            relative += float(delta.square().sum() / made.clean[0].square().sum()) / 3
        start = 0
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.5 * step[start : start + p.numel()].view_as(p).to(p)
                start += p.numel()
    if defense is None:
        return None
    return Applied(3, math.sqrt(asked), math.sqrt(applied), math.sqrt(relative))


def weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


class Watching:
    """Keeps the weights that training ended with; accuracy is a number of them."""

    def __init__(self) -> None:
        self.ended: list[Tensor] = []

    def __call__(self, net: nn.Module) -> float:
        self.ended.append(weights(net))
        return float(self.ended[-1].abs().mean()) / 2


@pytest.fixture(scope="module")
def measured() -> tuple[TradeOff, Watching]:
    x, y = samples(1)
    watching = Watching()
    found = trade_off(network(), x, y, training, watching, seeds=[4], index=[7], **GRID)
    return found, watching


def cell(found: TradeOff, defense: str, budget: float) -> Cell:
    return next(c for c in found.cells if (c.defense, c.budget) == (defense, budget))


def test_same_weights_and_data_for_all(measured: tuple[TradeOff, Watching]) -> None:
    found, watching = measured
    ended = dict(
        zip([(c.defense, c.budget) for c in found.cells], watching.ended, strict=True)
    )
    clean = ended["none", 0.0]
    for name in GRID["defenses"]:
        assert torch.equal(ended[name, 0.0], clean)
        assert not torch.equal(ended[name, 0.3], clean)
    alone = network()
    torch.manual_seed(4)
    training(alone, None, 4)
    assert torch.equal(weights(alone), clean)


def test_every_seed_has_its_own_data_and_noise() -> None:
    x, y = samples(1)
    watching = Watching()
    found = trade_off(
        network(),
        x,
        y,
        training,
        watching,
        defenses=["gaussian"],
        budgets=[0.5],
        seeds=2,
        attack=FirstOrder(name="short", steps=1),
        steps=1,
        attackers=["naive"],
    )
    assert [(c.defense, c.seed) for c in found.cells] == [
        ("none", 0),
        ("gaussian", 0),
        ("none", 1),
        ("gaussian", 1),
    ]
    ended = torch.stack(watching.ended)
    assert len(ended.unique(dim=0)) == 4
    deltas = {c.attacked[0].delta_norm for c in found.cells if c.budget}
    assert len(deltas) == 2
    assert [(r.defense, r.cells, r.messages) for r in found.summary] == [
        ("none", 2, 2),
        ("gaussian", 2, 2),
    ]


def test_what_was_really_applied(measured: tuple[TradeOff, Watching]) -> None:
    found, _ = measured
    pruned = cell(found, "pruning", 0.3)
    # As much as fits, up to one entry.
    assert all(0.27 < a.relative <= 0.3 for a in pruned.attacked)
    assert pruned.applied is not None
    assert 0.27 < pruned.applied.relative <= 0.3
    noisy = cell(found, "gaussian", 0.3)
    assert noisy.applied is not None
    assert noisy.applied.steps == 3
    # ‖δ‖ of 93 entries varies by 7 %, its root mean square over 3 steps by 4 %.
    assert noisy.applied.norm == pytest.approx(noisy.applied.asked, rel=0.17)
    assert all(a.relative == pytest.approx(0.3, rel=0.3) for a in noisy.attacked)
    row = next(r for r in found.rows if r.defense == "pruning" and r.budget > 0)
    assert row.training_norm == pruned.applied.norm
    assert row.message_relative == pruned.attacked[0].relative
    assert cell(found, "gaussian", 0.0).attacked[0].delta_norm == 0.0


def test_without_noise_images_are_found_exactly(
    measured: tuple[TradeOff, Watching],
) -> None:
    found, _ = measured
    exact = cell(found, "none", 0.0)
    for attacked in exact.attacked:
        for who in ("naive", "adaptive"):
            assert attacked.outcomes[who].status == OK
            assert attacked.outcomes[who].psnr > 60
            assert attacked.outcomes[who].predicted == CEILING
    row = next(r for r in found.rows if r.defense == "none")
    assert row.psnr["naive"] > 60


def test_predictions_are_those_of_the_linearised_attackers() -> None:
    x, y = samples(2)
    net = network().double()
    mean, std = (0.4,), (0.25,)
    attacking = attack_of((x - 0.4) / 0.25, y, mean=mean, std=std, prior_std=0.3)
    noise = EigenNoise(Budget(0.3), Smallest(2))
    got = attacking.run(net, noise, 0)
    # The same in pixels: the network takes them, and the Jacobian is by them.
    scale = torch.full((6,), 4.0, dtype=torch.float64)
    at = GradientMap(net, dtype=torch.float64)
    mine = Samples(at, ((x - 0.4) / 0.25).double(), y, input_scale=scale)
    made = noise.protect(mine.gradient, generator=torch.Generator(), samples=mine)
    errors = predicted_errors(made, mine, prior_std=0.3)
    for who, error in (("naive", errors.naive), ("adaptive", errors.adaptive)):
        expected = (-10 * (error / 6).log10()).tolist()
        assert [a.outcomes[who].predicted for a in got] == pytest.approx(
            expected, abs=1e-6
        )


def test_who_drops_a_noised_direction_sees_all_but_that() -> None:
    """What the direction carried is the distance from the prior's mean along it."""
    x, y = samples(1)
    net = network(hidden=20).double()
    at = Samples(GradientMap(net, dtype=torch.float64), x.double(), y)
    u, lam = at.basis.directions[0, :, 3], float(at.basis.eigenvalues[0, 3])
    carried, r = 0.03, 0.3
    mean = x[0].double() - carried * u.view(1, 2, 3)
    # 30 times what an image can move that entry by: hardly anything of it is left.
    noise = EigenNoise(Budget(30 * r * math.sqrt(lam), "norm"), Single(3), "sign")
    engine = replace(FAST, box=False, logits=False, fast=False, prior_mean=mean)
    got = attack_of(x, y, engine=engine, prior_std=r).run(net, noise, 0)[0]
    outcome = got.outcomes["adaptive"]
    assert outcome.status == OK
    # The maximum of the posterior along u, whatever the sign of the noise.
    d = got.delta_norm**2
    ends = [
        (s * math.sqrt(lam * d) * r**2 - d * carried) / (d + lam * r**2)
        for s in (1, -1)
    ]
    found = math.sqrt(6 * 10 ** (-outcome.psnr / 10))
    assert min(abs(found / abs(end) - 1) for end in ends) < 0.01
    naive = got.outcomes["naive"]
    assert not naive.status.usable or naive.psnr < outcome.psnr - 20


def test_pruned_entries_are_dropped_by_those_who_know() -> None:
    x, y = samples(1)
    got = attack_of(x, y).run(
        network(hidden=20).double(), PruningToBudget(Budget(0.3)), 0
    )
    for attacked in got:
        assert attacked.outcomes["adaptive"].psnr > 60
        naive = attacked.outcomes["naive"]
        assert not naive.status.usable or naive.psnr < 40


def test_isotropic_noise_has_nothing_to_know() -> None:
    x, y = samples(2)
    noise = GaussianNoise(Budget(0.2))
    who = ("naive", "estimating", "adaptive")
    got = attack_of(x, y, attackers=who).run(network().double(), noise, 0)
    for attacked in got:
        assert len({o.psnr for o in attacked.outcomes.values()}) == 1
    only = attack_of(x, y, attackers=("adaptive",)).run(network().double(), noise, 0)
    assert list(only[0].outcomes) == ["adaptive"]
    assert only[0].outcomes["adaptive"].psnr == pytest.approx(
        got[0].outcomes["adaptive"].psnr, abs=0.1
    )


def test_who_imagines_the_true_image_knows_all() -> None:
    x, y = samples(2)
    at = Samples(GradientMap(network(), dtype=torch.float64), x.double(), y)
    noise = EigenNoise(Budget(0.1), Smallest(2))
    shared = share(noise, at, 0)
    knows = informed(at, shared, 1)
    guesses = reimagined(noise, shared, at, 1, at.x[1:], 0)
    found, wanted = guesses.observation, knows.observation
    torch.testing.assert_close(found.message, wanted.message, rtol=1e-9, atol=1e-12)
    assert found.noise_std == pytest.approx(wanted.noise_std, rel=1e-9)
    other = reimagined(noise, shared, at, 1, at.x[:1], 0).observation
    assert float((other.message - wanted.message).norm()) > 1e-3
    took = attack_of(x, y, attackers=("estimating",)).run(network(), noise, 0)
    assert [list(a.outcomes) for a in took] == [["estimating"]] * 2
    assert all(math.isnan(a.outcomes["estimating"].predicted) for a in took)


def test_what_an_attack_cannot_do_is_not_computed() -> None:
    x, y = samples(2)
    net = network().double()
    clipped = attack_of(x, y).run(net, DPSGD(1e-2, 0.0), 0)
    assert clipped[0].outcomes["adaptive"].status.word == "not computed"
    assert math.isnan(clipped[0].outcomes["adaptive"].psnr)
    assert "distance='cosine'" in clipped[0].outcomes["adaptive"].status.reason
    cosine = FirstOrder(name="l2", distance="l2", steps=5)
    able = attack_of(x, y, engine=cosine).run(net, DPSGD(1e-2, 0.0), 0)
    assert able[0].outcomes["adaptive"].status.word != "not computed"


def test_an_attack_that_does_not_match_is_no_success() -> None:
    x, y = samples(2)
    engine = FirstOrder(name="short", distance="l2", steps=1, lr=1e-9)
    got = attack_of(x, y, engine=engine, start="uniform").run(
        network().double(), None, 0
    )
    assert {a.outcomes["naive"].status.word for a in got} == {"not converged"}
    assert all(math.isnan(a.outcomes["naive"].psnr) for a in got)


def test_a_failing_cell_is_recorded_and_the_others_go_on() -> None:
    x, y = samples(1)

    def fails(net: nn.Module, defense: Defense | None, seed: int) -> None:
        if isinstance(defense, GaussianNoise):
            raise RuntimeError("training diverged")
        if isinstance(defense, PruningToBudget):
            with torch.no_grad():
                next(net.parameters()).fill_(math.nan)

    said: list[str] = []
    found = trade_off(
        network(),
        x,
        y,
        fails,
        lambda _: 0.5,
        defenses=["gaussian", "pruning", "eigen-smallest"],
        budgets=[0.5],
        attack=FAST,
        progress=said.append,
    )
    rows = {row.defense: row for row in found.summary}
    assert rows["gaussian"].failed == 1
    assert "training diverged" in rows["gaussian"].status
    assert math.isnan(rows["gaussian"].accuracy)
    for name in ("gaussian", "pruning"):
        assert math.isnan(rows[name].psnr["naive"])
        assert math.isnan(rows[name].worst["adaptive"])
    assert rows["eigen-smallest"].failed == 0
    assert "training diverged" in said[1]
    assert found.table().count("not known") >= 4
    figure = found.figure()
    drawn = {t.name: t.y for t in figure.data if t.visible}
    assert drawn["gaussian"] == (None,)


def test_more_than_half_unknown_is_not_known() -> None:
    def attacked(sample: int, *psnr: float) -> Attacked:
        good = Outcome(psnr[0], math.nan, 20.0) if psnr else None
        bad = Outcome.without(Status("not converged", "short"), 20.0)
        return Attacked(sample, 0, 1.0, 0.1, {"naive": bad if good is None else good})

    one = Cell("gaussian", 0.1, 0, 0.9, (attacked(0, 10.0), attacked(1, 14.0)))
    two = Cell("gaussian", 0.1, 1, 0.7, (attacked(0, 30.0), attacked(1)))
    row = TradeOffRow.of([one, two], ["naive"], None)
    assert (row.psnr["naive"], row.worst["naive"]) == (14.0, 30.0)
    assert row.inconclusive["naive"] == 1
    assert row.accuracy == pytest.approx(0.8)
    gone = Cell("gaussian", 0.1, 2, math.nan, status=Status("failed", "why"))
    few = TradeOffRow.of([gone, two], ["naive"], None)
    assert math.isnan(few.psnr["naive"])
    assert few.worst["naive"] == 30.0
    assert (few.failed, few.cells) == (1, 2)


def test_a_budget_that_training_did_not_keep_is_named() -> None:
    def cell_of(relative: float) -> Cell:
        applied = Applied(3, 1.0, 1.0, relative)
        return Cell("gaussian", 0.1, 0, 0.9, (), applied)

    for relative, named in ((0.33, True), (0.05, True), (0.11, False)):
        found = TradeOff((cell_of(relative),), ("naive",), "relative")
        text = f"gaussian at 0.100: training consumed ‖δ‖/‖g‖ = {relative:.3g}"
        assert (text in found.table()) == named
        assert "training consumed" not in replace(found, unit="norm").table()


def test_table_is_what_the_samples_say(
    measured: tuple[TradeOff, Watching], tmp_path: Path
) -> None:
    found, _ = measured
    report = found.save(tmp_path / "out")
    assert report == tmp_path / "out" / "report.html"
    with (tmp_path / "out" / "samples.csv").open(newline="") as file:
        stored = list(csv.DictReader(file))
    assert {r["sample"] for r in stored} == {"7"}
    for row in found.summary:
        for who in ("naive", "adaptive"):
            mine = [
                float(r["psnr"])
                for r in stored
                if (r["defense"], float(r["budget"]), r["attacker"])
                == (row.defense, row.budget, who)
                and r["psnr"]
            ]
            assert 1 - len(mine) == row.inconclusive[who]
            if math.isnan(row.psnr[who]):
                assert len(mine) < 1
                continue
            middle = sorted(mine)
            half = len(middle) // 2
            expected = (middle[half] + middle[~half]) / 2
            assert row.psnr[who] == pytest.approx(expected, rel=1e-12)
            assert row.worst[who] == max(mine)
            assert f"{row.psnr[who]:.1f}" in found.table()
    with (tmp_path / "out" / "trade_off.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(found.cells) == 7
    assert float(lines[0]["accuracy"]) == found.cells[0].accuracy
    content = json.loads((tmp_path / "out" / "trade_off.json").read_text())
    assert len(content["summary"]) == 7
    page = report.read_text()
    assert "What a defense costs" in page
    assert "http://" not in page.split("<script>")[0]


def test_figure_shows_every_budget(measured: tuple[TradeOff, Watching]) -> None:
    found, _ = measured
    shown = {t.name: t for t in found.figure().data if t.visible}
    traces = {name: t for name, t in shown.items() if list(t.y) != [None]}
    assert list(traces) == ["none", *GRID["defenses"]]
    named = [name for name in shown if name not in traces]
    assert named == [
        "clearly recognisable above 20 dB",
        "hardly recognisable below 12 dB",
    ]
    rows = [r for r in found.summary if r.defense == "gaussian"]
    assert list(traces["gaussian"].x) == pytest.approx([r.accuracy for r in rows])
    # One message a budget: too few attacks to lead.
    assert list(traces["gaussian"].y) == pytest.approx(
        [min(r.predicted["adaptive"], 60.0) for r in rows]
    )
    assert list(traces["none"].marker.symbol) == ["star"]


def test_without_plotly_tables_are_written(
    measured: tuple[TradeOff, Watching], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("plotly", "plotly.offline", "plotly.graph_objects"):
        monkeypatch.setitem(sys.modules, name, None)
    assert measured[0].save(tmp_path) == tmp_path / "trade_off.json"
    assert not (tmp_path / "report.html").exists()


def test_nothing_global_is_touched() -> None:
    x, y = samples(1)
    net = network()
    before, state = weights(net), torch.get_rng_state()
    trade_off(
        net,
        x,
        y,
        training,
        lambda _: 0.1,
        defenses=["gaussian"],
        budgets=[1.0],
        steps=1,
    )
    assert torch.equal(weights(net), before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", registered_defenses())
def test_every_named_defense_has_its_budget(name: str) -> None:
    make = named_defenses([name], directions=2, box=0.5)[name]
    defense = make(Budget(0.2))
    assert defense.budget == Budget(0.2)
    assert defense.name == name
    x, y = samples(2)
    at = Samples(GradientMap(network(), dtype=torch.float64), x.double(), y)
    made = defense.protect(at.gradient, generator=torch.Generator(), samples=at)
    spent = made.variance
    if made.bias is not None:
        spent = spent + made.bias.square().sum(1)
    asked = (0.2 * at.gradient.norm(dim=1)).square()
    assert bool((spent <= asked * (1 + 1e-9)).all())
    assert bool((spent > 0).all())


def test_defenses_of_ones_own() -> None:
    x, y = samples(1)
    found = trade_off(
        network(),
        x,
        y,
        lambda *_: None,
        lambda _: 0.5,
        defenses={"last": lambda budget: EigenNoise(budget, Single(-1))},
        budgets=[Budget(0.1, "norm")],
        attack=FAST,
        attackers=["naive"],
    )
    assert found.defenses == ("none", "last")
    assert found.unit == "norm"
    assert found.attackers == ("naive",)


def test_mistakes_are_said_before_anything_is_trained() -> None:
    x, y = samples(2)

    def never(*_: object) -> None:
        raise AssertionError("trained")

    for match, changed in (
        (
            "unknown defense 'gausian'; did you mean 'gaussian'",
            {"defenses": ["gausian"]},
        ),
        ("at least one", {"defenses": []}),
        ("different names", {"defenses": ["pruning", "pruning"]}),
        ("'none' is always compared", {"defenses": ["none"]}),
        (r"list with at least one, such as \[0\.1", {"budgets": []}),
        (
            r"several units \(relative, norm\)",
            {"budgets": [0.1, Budget(1.0, "norm")]},
        ),
        ("must be different", {"budgets": [0.1, 0.1]}),
        ("unit must be one of", {"unit": "percent"}),
        ("at least 0 and finite, got -1", {"budgets": [-1.0]}),
        ("seeds must be", {"seeds": 0}),
        ("unknown attack 'dlgg'", {"attack": "dlgg"}),
        ("attackers must be some of", {"attackers": ["nobody"]}),
        ("attackers must be some of", {"attackers": []}),
        ("unknown start 'far'", {"start": "far"}),
        ("data-set index 1 occurs twice", {"index": [1, 1]}),
        ("outside of", {"mean": [0.0], "std": [9.0]}),
        ("box must be positive and finite", {"box": 0.0}),
        ("prior_std must be positive and finite", {"prior_std": -1.0}),
        ("restarts must be at least 1", {"restarts": 0}),
    ):
        with pytest.raises(ValueError, match=match):
            trade_off(network(), x, y, never, lambda _: 0.5, **changed)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a function of a Budget"):
        trade_off(network(), x, y, never, lambda _: 0.5, defenses={"a": 3})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="at least one"):
        named_budgets(0.1)  # type: ignore[arg-type]
