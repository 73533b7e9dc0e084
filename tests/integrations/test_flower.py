"""A federation under Flower: without Ray, and in its simulation engine."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakwatch import LocalTraining, attack_update, score_update
from leakwatch.callbacks import UpdateAudit
from leakwatch.federated import average_updates, client_updates, train_client
from leakwatch.federated.objective import Objective
from leakwatch.reporting import RiskLedger, Row, write_report
from leakwatch.weight_update import WeightUpdate

pytest.importorskip("flwr")

from flwr.app import (
    ArrayRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from leakwatch.integrations.flower import AuditingStrategy, LeakageMod
from leakwatch.integrations.flower.mod import HELD_BACK
from leakwatch.integrations.flower.weights import state_of

TRAINING = LocalTraining(epochs=1, batch_size=2, lr=0.2)
CLIENTS, EACH = 3, 4


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(16, 8), nn.Sigmoid(), nn.Linear(8, 3)
        )


def held(client: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(client)
    return torch.rand(EACH, 1, 4, 4, generator=generator), torch.arange(EACH) % 3


def samples(context: Context) -> tuple[Tensor, Tensor]:
    return held(int(context.node_config["partition-id"]))


def trained(message: Message, context: Context) -> Message:
    """Local training as anybody's ClientApp does it, here with leakwatch's own."""
    net = network()
    net.load_state_dict(
        next(iter(message.content.array_records.values())).to_torch_state_dict()
    )
    client = int(context.node_config["partition-id"])
    number = int(message.content["config"]["server-round"])
    update = train_client(net, *held(client), TRAINING, client=client, round=number)
    Objective(net).put(update.final, update.buffers)
    content = RecordDict(
        {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"num-examples": EACH}),
        }
    )
    return Message(content, reply_to=message)


class Grid:
    """Hands messages to clients in this process, one after the other."""

    def __init__(self, app: ClientApp, nodes: Iterable[int] = range(CLIENTS)) -> None:
        self.app = app
        self.contexts = {
            100 + node: Context(
                run_id=7,
                node_id=100 + node,
                node_config={"partition-id": node},
                state=RecordDict(),
                run_config={},
            )
            for node in nodes
        }
        self.replies: list[Message] = []

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        replies = []
        # Nodes are sampled in an order of chance, in which averages would add up.
        for message in sorted(messages, key=lambda m: m.metadata.dst_node_id):
            node = message.metadata.dst_node_id
            replies.append(self.app(message, self.contexts[node]))
        self.replies += replies
        return replies


@pytest.fixture(autouse=True)
def run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TaskIdentity, "_run_id", 7, raising=False)
    monkeypatch.setattr(TaskIdentity, "_node_id", 1, raising=False)
    monkeypatch.setattr(TaskIdentity, "_task_id", 1, raising=False)


def app_with(*mods: Any, train: Callable[..., Message] = trained) -> ClientApp:
    app = ClientApp(mods=list(mods))
    app.train()(train)
    return app


def started(grid: Grid, strategy: Any, rounds: int = 1) -> dict[str, Tensor]:
    first = ArrayRecord(network().state_dict())
    result = strategy.start(grid, first, num_rounds=rounds)
    arrays = result.arrays
    return (
        dict(arrays.to_torch_state_dict()) if arrays is not None and len(arrays) else {}
    )


def plain() -> FedAvg:
    return FedAvg(fraction_evaluate=0.0)


def of(rows: Iterable[Row], quantity: str) -> list[float]:
    return [row.value for row in rows if row.quantity == quantity]


def mod(folder: Path, **options: Any) -> LeakageMod:
    return LeakageMod(network, samples, TRAINING, directory=folder, **options)


def update_of(client: int, number: int = 1) -> Any:
    return train_client(network(), *held(client), TRAINING, client=client, round=number)


def test_a_client_records_the_scores_of_what_it_sends(tmp_path: Path) -> None:
    grid = Grid(app_with(mod(tmp_path)))
    final = started(grid, plain())
    alone = started(Grid(app_with()), plain())
    assert {k: v.tolist() for k, v in final.items()} == {
        k: v.tolist() for k, v in alone.items()
    }
    for client in range(CLIENTS):
        folder = tmp_path / "run-7" / f"client-{client}"
        rows = RiskLedger.open(folder).rows()
        x, y = held(client)
        [shared] = client_updates([update_of(client)])
        expected = score_update(network(), x[None], y[None], shared)
        for name in ("lavp_l2_max", "i2f_bayes_psnr", "joint_i2f_bayes_psnr"):
            got = torch.tensor(of(rows, name), dtype=torch.float64)
            torch.testing.assert_close(got, expected[name][0], rtol=1e-5, atol=0)
        assert not [row for row in rows if row.quantity.startswith("audit/random")]
        assert {row.epoch for row in rows} == {1}
    assert "joint" in write_report(folder).read_text()


def test_nothing_but_weights_leaves_a_client(tmp_path: Path) -> None:
    grid = Grid(app_with(mod(tmp_path)))
    started(grid, plain())
    for reply in grid.replies:
        [arrays] = reply.content.array_records.values()
        assert list(arrays) == list(network().state_dict())
        [metrics] = reply.content.metric_records.values()
        assert list(metrics) == ["num-examples"]
        [config] = reply.content.config_records.values()
        assert list(config) == ["client"]


def test_rounds_of_a_client_are_one_record(tmp_path: Path) -> None:
    started(Grid(app_with(mod(tmp_path))), plain(), rounds=2)
    ledger = RiskLedger.open(tmp_path / "run-7" / "client-0")
    assert {row.epoch for row in ledger.rows()} == {1, 2}
    assert not ledger.problems


def test_an_update_that_exposes_too_much_is_held_back(tmp_path: Path) -> None:
    worst = {
        client: max(
            float(v)
            for v in score_update(
                network(),
                held(client)[0][None],
                held(client)[1][None],
                client_updates([update_of(client)])[0],
            )["joint_i2f_bayes_psnr"].flatten()
        )
        for client in range(CLIENTS)
    }
    order = sorted(worst, key=worst.__getitem__)
    limit = (worst[order[1]] + worst[order[2]]) / 2
    grid = Grid(app_with(mod(tmp_path, max_psnr=limit)))
    final = started(grid, plain())
    errors = [reply for reply in grid.replies if reply.has_error()]
    assert [error.error.code for error in errors] == [HELD_BACK]
    assert errors[0].metadata.src_node_id == 100 + order[2]
    assert f"{worst[order[2]]:.1f}" not in errors[0].error.reason
    # The average is that of the others.
    weights, _ = average_updates([update_of(c) for c in sorted(order[:2])])
    got = torch.cat([t.reshape(-1) for t in final.values()])
    torch.testing.assert_close(got, weights, rtol=1e-5, atol=1e-7)


def test_a_warning_lets_it_leave(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = Grid(app_with(mod(tmp_path, max_psnr=-50.0, action="warn")))
    with caplog.at_level(logging.WARNING, "leakwatch.flower"):
        assert started(grid, plain())
    assert not any(reply.has_error() for reply in grid.replies)
    assert "4 of 4 samples are above -50 dB" in caplog.text


@pytest.mark.parametrize("limited", [True, False])
def test_unknown_is_not_safe(tmp_path: Path, limited: bool) -> None:
    def missing(context: Context) -> tuple[Tensor, Tensor]:
        raise RuntimeError("the disk is gone")

    strict = LeakageMod(
        network,
        missing,
        TRAINING,
        directory=tmp_path,
        max_psnr=1000.0 if limited else None,
    )
    grid = Grid(app_with(strict))
    started(grid, plain())
    assert all(reply.has_error() == limited for reply in grid.replies)


def test_an_error_of_the_client_passes(tmp_path: Path) -> None:
    from flwr.app import Error

    def broken(message: Message, context: Context) -> Message:
        return Message(Error(3, "no data"), reply_to=message)

    grid = Grid(app_with(mod(tmp_path, max_psnr=1.0), train=broken))
    started(grid, plain())
    assert {reply.error.code for reply in grid.replies} == {3}


def test_the_server_attacks_what_arrived(tmp_path: Path) -> None:
    audit = UpdateAudit(clients=[1], attack="sme", steps=5, data_range=1.0)
    strategy = AuditingStrategy(
        plain(),
        network,
        TRAINING,
        audit=audit,
        sample_shape=(1, 4, 4),
        directory=tmp_path,
    )
    final = started(Grid(app_with()), strategy)
    alone = started(Grid(app_with()), plain())
    assert {k: v.tolist() for k, v in final.items()} == {
        k: v.tolist() for k, v in alone.items()
    }
    # Without the mod clients are numbered as they come.
    rows = RiskLedger.open(tmp_path / "run-7").rows()
    sent = update_of(1)
    known = WeightUpdate(
        sent.initial, sent.final[None], None, (1, 4, 4), EACH, TRAINING, (1,)
    )
    right = attack_update(network(), known, "sme", steps=5, data_range=1.0)
    assert of(rows, "update/client-1/loss") == pytest.approx(right.loss.tolist())
    assert of(rows, "update/client-1/matched") == [float(right.status[0].usable)]
    [kept] = RiskLedger.open(tmp_path / "run-7").attacks()
    assert kept["random"].shape == (EACH, 4, 4, 1)
    assert "client-1" in (tmp_path / "run-7" / "report.html").read_text()


def test_a_simulation_knows_the_truth(tmp_path: Path) -> None:
    audit = UpdateAudit(clients=2, attack="sme", steps=5, data_range=1.0, report=False)
    strategy = AuditingStrategy(
        plain(), network, TRAINING, audit=audit, samples=held, directory=tmp_path
    )
    started(Grid(app_with(mod(tmp_path / "clients"))), strategy)
    ledger = RiskLedger.open(tmp_path / "run-7")
    rows = ledger.rows()
    assert ledger.read_metadata()["config"]["clients"] == [0, 1]
    psnr = [row for row in rows if row.quantity == "audit/random/psnr"]
    assert [row.sample for row in psnr] == [*range(4), *range(10**6, 10**6 + 4)]
    assert all(math.isfinite(row.value) for row in psnr)


def test_a_failed_audit_leaves_the_federation_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def silent(message: Message, context: Context) -> Message:
        reply = trained(message, context)
        del reply.content["metrics"]["num-examples"]
        reply.content["metrics"]["weight"] = 1.0
        return reply

    strategy = AuditingStrategy(
        FedAvg(fraction_evaluate=0.0, weighted_by_key="weight"),
        network,
        TRAINING,
        sample_shape=(1, 4, 4),
        audit=UpdateAudit(clients=1, steps=2, report=False),
        directory=tmp_path,
    )
    with caplog.at_level(logging.WARNING, "leakwatch.flower"):
        assert started(Grid(app_with(train=silent)), strategy)
    assert "does not say how many samples it has" in caplog.text
    rows = RiskLedger.open(tmp_path / "run-7").rows()
    assert all(row.status.startswith("failed") for row in rows)


def test_weights_are_read_by_name_or_by_position() -> None:
    net = network()
    own = net.state_dict()
    by_name = state_of(net, ArrayRecord(own))
    by_place = state_of(net, ArrayRecord([t.numpy() for t in own.values()]))
    for name, value in own.items():
        assert torch.equal(by_name[name], value)
        assert torch.equal(by_place[name], value)
    with pytest.raises(ValueError, match="the message holds 1 arrays"):
        state_of(net, ArrayRecord({"x": torch.zeros(1)}))
    wrong = {**own, "1.bias": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"1.bias has the shape \(3,\)"):
        state_of(net, ArrayRecord(wrong))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"action": "drop"}, ValueError, "action"),
        ({"max_psnr": "loud"}, TypeError, "max_psnr"),
        ({"audit": "sme"}, TypeError, "must be an UpdateAudit"),
        ({"share": 1.0}, ValueError, "share"),
    ],
)
def test_a_mod_refuses(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        mod(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "sample_shape is needed"),
        (
            {"sample_shape": (4,), "audit": UpdateAudit(attack=None)},
            "the audit has no attack",
        ),
    ],
)
def test_a_strategy_refuses(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        AuditingStrategy(plain(), network, TRAINING, **options)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of Ray, Flower and what they import
def test_the_example_runs_in_flowers_simulation_engine(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    example = Path(__file__).parents[2] / "examples" / "flower_mnist.py"
    options = {
        "clients": 3,
        "rounds": 2,
        "max-psnr": 20,
        "attacked": 3,
        "steps": 5,
        "directory": tmp_path,
    }
    said = [f"--{name}={value}" for name, value in options.items()]
    environment = {
        **os.environ,
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # or workers wait for all else on the machine
    }
    subprocess.run([sys.executable, example, *said], check=True, env=environment)
    kept = {path.parent.name: path.parent for path in tmp_path.rglob("run.json")}
    clients = {f"client-{i}" for i in range(3)}
    assert kept.keys() > clients
    exposed: dict[str, float] = {}
    for name in clients:
        rows = RiskLedger.open(kept[name]).rows()
        assert {row.epoch for row in rows} == {1, 2}
        first = [row for row in rows if row.epoch == 1]
        exposed[name] = max(of(first, "joint_i2f_bayes_psnr"))
    [server] = [kept[name] for name in kept if name not in clients]
    rows = RiskLedger.open(server).rows()
    arrived = {
        f"client-{row.sample // 10**6}"
        for row in rows
        if row.epoch == 1 and row.sample is not None
    }
    assert arrived
    assert arrived == {name for name, psnr in exposed.items() if psnr <= 20}
    assert (server / "report.html").is_file()
