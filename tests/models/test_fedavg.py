"""Federated averaging under a Trainer equals the plain simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn

from leakwatch.callbacks import GradientDefense, InversionAudit, LeakageMonitor
from leakwatch.datamodules import ArrayDataModule, ClientsDataModule
from leakwatch.defenses import Budget, GaussianNoise
from leakwatch.federated import FederatedAveraging, LocalTraining
from leakwatch.models import FedAvgModule
from leakwatch.reporting import RiskLedger

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:Checkpoint directory .* exists and is not empty:UserWarning",
    "ignore:The dirpath has changed:UserWarning",
    "ignore:Be aware that when using `ckpt_path`:UserWarning",
)

LOCAL: dict[str, Any] = {"epochs": 2, "batch_size": 4, "lr": 0.1, "momentum": 0.5}
ROUNDS = 3


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, bias=False),
        nn.BatchNorm2d(3),
        nn.Sigmoid(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(48, 3),
    )


@pytest.fixture
def arrays(tmp_path: Path) -> str:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 128, (60, 6, 6), np.uint8)
    labels = np.arange(60) % 3
    for image, label in zip(images, labels, strict=True):
        image[2 * label : 2 * label + 2] += 127
    path = tmp_path / "images.npz"
    np.savez(path, train_images=images, train_labels=labels)
    return str(path)


def clients(path: str, **kwargs: Any) -> ClientsDataModule:
    source = ArrayDataModule(path, batch_size=8)
    split = {"clients": 5, "alpha": 0.5, "share": 0.6, "seed": 1, **kwargs}
    return ClientsDataModule(source, "dirichlet", **split)


def module(**kwargs: Any) -> FedAvgModule:
    changes = {"freeze_batchnorm": False, "num_classes": 3, "seed": 1, **kwargs}
    return FedAvgModule(network(), **LOCAL, **changes)


def trainer(root: Path, rounds: int = ROUNDS, *callbacks: Callback) -> L.Trainer:
    return L.Trainer(
        default_root_dir=root,
        max_epochs=rounds,
        accelerator="cpu",
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


class Look(Callback):
    """Weights and metrics after every round."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_epoch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule
    ) -> None:
        metrics = {
            k: v.clone()
            for k, v in trainer.callback_metrics.items()
            if k.startswith(("train/", "val/"))
        }
        state = {k: v.clone() for k, v in pl_module.state_dict().items()}
        self.seen.append(
            {
                "state": state,
                "metrics": metrics,
                "step": trainer.global_step,
                "stream": torch.get_rng_state(),
                "modes": [m.training for m in pl_module.modules()],
            }
        )


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def run(root: Path, path: str, *callbacks: Callback, **kwargs: Any) -> Look:
    look = Look()
    net = module(**kwargs)
    torch.manual_seed(5)
    trainer(root, ROUNDS, *callbacks, look).fit(net, datamodule=clients(path))
    return look


@pytest.mark.parametrize("buffers", ["averaged", "kept"])
def test_equals_the_plain_simulation(tmp_path: Path, arrays: str, buffers: Any) -> None:
    look = run(tmp_path, arrays, buffers=buffers)
    data = clients(arrays)
    data.setup()
    net = network()
    server = FederatedAveraging(
        net,
        data.clients,
        LocalTraining(**LOCAL),
        share=0.6,
        seed=1,
        freeze_batchnorm=False,
        buffers=buffers,
    )
    for number, found in enumerate(server.run(ROUNDS)):
        state: dict[str, Tensor] = look.seen[number]["state"]
        own = {k[6:]: v for k, v in state.items() if k.startswith("model.")}
        assert_same(own, dict(net.state_dict()))
        metrics = look.seen[number]["metrics"]
        assert float(metrics["train/loss"]) == pytest.approx(found.loss, rel=1e-6)
        assert float(metrics["train/clients"]) == len(found.updates) == 3
        assert look.seen[number]["step"] == number + 1


def test_validation_metrics_are_those_of_the_server(
    tmp_path: Path, arrays: str
) -> None:
    net, data = module(), clients(arrays)
    fit = trainer(tmp_path, 8)
    fit.fit(net, datamodule=data)
    val = data.data.val_dataset
    x = torch.stack([val[i][0] for i in range(len(val))])
    net.eval()
    logits = net(x).detach()
    loss = nn.functional.cross_entropy(logits, val.targets)
    accuracy = (logits.argmax(1) == val.targets).float().mean()
    metrics = fit.callback_metrics
    torch.testing.assert_close(metrics["val/loss"], loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(metrics["val/acc"], accuracy, rtol=1e-6, atol=0)
    assert float(metrics["val/acc"]) > 0.6


def test_the_last_round_holds_what_clients_sent(tmp_path: Path, arrays: str) -> None:
    net, data = module(), clients(arrays)
    trainer(tmp_path, 2).fit(net, datamodule=data)
    found = net.last_round
    assert found is not None
    assert found.number == 1
    for update in found.updates:
        x, y = data.clients[update.client]
        assert_same(update.x, x)
        assert_same(update.y, y)
    weights = torch.cat([p.detach().reshape(-1) for p in net.model.parameters()])
    assert_same(found.weights, weights)


def test_resumed_equals_uninterrupted(tmp_path: Path, arrays: str) -> None:
    whole = run(tmp_path / "whole", arrays)
    keep = ModelCheckpoint(tmp_path / "kept", save_top_k=-1, filename="{epoch}")
    first = module()
    trainer(tmp_path / "first", 2, keep).fit(first, datamodule=clients(arrays))
    torch.manual_seed(99)
    look, second = (
        Look(),
        FedAvgModule(
            network(7), **LOCAL, freeze_batchnorm=False, num_classes=3, seed=1
        ),
    )
    trainer(tmp_path / "second", ROUNDS, look).fit(
        second,
        datamodule=clients(arrays),
        ckpt_path=str(tmp_path / "kept" / "epoch=1.ckpt"),
    )
    assert len(look.seen) == 1
    assert_same(look.seen[0]["state"], whole.seen[2]["state"])
    assert look.seen[0]["step"] == 3


def test_monitors_leave_training_alone(tmp_path: Path, arrays: str) -> None:
    plain = run(tmp_path / "plain", arrays)
    monitor = LeakageMonitor(
        probes=2, scores=["lavp_l2_max"], verbose=False, report=False
    )
    audit = InversionAudit(
        probes=1,
        steps=2,
        scores=["lavp_l2_max"],
        verbose=False,
        report=False,
        name="audit",
    )
    watched = run(tmp_path / "watched", arrays, monitor, audit)
    assert_same(watched.seen, plain.seen)
    assert monitor.run_directory is not None
    rows = list(RiskLedger.open(monitor.run_directory).rows())
    scores = [r for r in rows if r.quantity == "lavp_l2_max" and r.sample is not None]
    assert sorted({(r.epoch, r.step) for r in scores}) == [(i, i) for i in range(4)]
    assert len({r.value for r in scores}) == 8


def test_the_global_stream_does_not_matter(tmp_path: Path, arrays: str) -> None:
    first = run(tmp_path, arrays)
    look = Look()
    net = module()
    torch.manual_seed(77)
    trainer(tmp_path, ROUNDS, look).fit(net, datamodule=clients(arrays))
    assert_same(look.seen[-1]["state"], first.seen[-1]["state"])


def test_a_defense_of_gradients_is_refused(tmp_path: Path, arrays: str) -> None:
    defense = GradientDefense(GaussianNoise(Budget(1.0)))
    with pytest.raises(RuntimeError, match="clients share weights"):
        trainer(tmp_path, 1, defense).fit(module(), datamodule=clients(arrays))


def test_other_batches_are_refused(tmp_path: Path, arrays: str) -> None:
    with pytest.raises(TypeError, match="ClientsDataModule"):
        trainer(tmp_path, 1).fit(module(), datamodule=ArrayDataModule(arrays))


def test_half_precision_is_refused(tmp_path: Path, arrays: str) -> None:
    net = FedAvgModule(network().bfloat16(), **LOCAL, num_classes=3)
    with pytest.raises(ValueError, match=r"torch\.bfloat16.*precision='32-true'"):
        trainer(tmp_path, 1).fit(net, datamodule=clients(arrays))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"clients": 0}, ValueError, "clients must be at least 1"),
        ({"alpha": "x"}, TypeError, "alpha must be a number"),
        ({"least": 1.5}, TypeError, "least must be an integer"),
        ({"share": None}, TypeError, "share must be a number"),
    ],
)
def test_wrong_federations_are_refused_before_they_load(
    arrays: str, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        clients(arrays, **changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lr": 0.0}, "lr must be positive"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"momentum": 1.0}, "momentum"),
        ({"seed": -1}, "at least 0"),
        ({"buffers": "lost"}, "'averaged' or 'kept'"),
        ({"model": "nonsense"}, "Unknown model"),
    ],
)
def test_errors(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FedAvgModule(**changes)


def test_a_checkpoint_builds_the_module_again(tmp_path: Path, arrays: str) -> None:
    net = FedAvgModule("linear", image_size=6, num_classes=3, **LOCAL)
    keep = ModelCheckpoint(tmp_path, filename="last")
    trainer(tmp_path, 1, keep).fit(net, datamodule=clients(arrays))
    again = FedAvgModule.load_from_checkpoint(tmp_path / "last.ckpt")
    assert again.training_settings == LocalTraining(**LOCAL)
    assert_same(dict(again.state_dict()), dict(net.state_dict()))


def test_several_processes_and_scalers_are_refused(tmp_path: Path) -> None:
    net = module()
    net.trainer = L.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", devices=2, logger=False
    )
    with pytest.raises(RuntimeError, match="the Trainer has 2; use devices=1"):
        net.setup("fit")
    net.setup("validate")
    net.trainer = trainer(tmp_path, 1)
    net.setup("fit")
    net.trainer.precision_plugin.scaler = object()
    with pytest.raises(RuntimeError, match="precision='32-true'"):
        net.setup("fit")
