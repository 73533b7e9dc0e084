"""Federated averaging under a Trainer equals the plain simulation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from fedavg_runs import (
    LOCAL,
    ROUNDS,
    Look,
    assert_same,
    clients,
    module,
    network,
    run,
    trainer,
    write_arrays,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.transforms import Compose, RandomCrop, RandomHorizontalFlip

from leakwatch.callbacks import InversionAudit, LeakageMonitor
from leakwatch.datamodules import (
    ArrayDataModule,
    ClientDataset,
    ImageArrays,
    ImageDataset,
    RoundSampler,
)
from leakwatch.federated import FederatedAveraging, LocalTraining
from leakwatch.models import FedAvgModule
from leakwatch.reporting import RiskLedger

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:Checkpoint directory .* exists and is not empty:UserWarning",
    "ignore:The dirpath has changed:UserWarning",
    "ignore:Be aware that when using `ckpt_path`:UserWarning",
)


@pytest.fixture
def arrays(tmp_path: Path) -> str:
    return write_arrays(tmp_path)


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


def resumed(root: Path, data: Callable[[], L.LightningDataModule]) -> tuple[Look, Look]:
    """A run of three rounds, and its last round again after two and a checkpoint."""
    whole, part = Look(), Look()
    torch.manual_seed(5)
    trainer(root / "whole", ROUNDS, whole).fit(module(), datamodule=data())
    keep = ModelCheckpoint(root / "kept", save_top_k=-1, filename="{epoch}")
    trainer(root / "first", 2, keep).fit(module(), datamodule=data())
    torch.manual_seed(99)
    second = FedAvgModule(
        network(7), **LOCAL, freeze_batchnorm=False, num_classes=3, seed=1
    )
    trainer(root / "second", ROUNDS, part).fit(
        second, datamodule=data(), ckpt_path=str(root / "kept" / "epoch=1.ckpt")
    )
    return whole, part


@pytest.mark.parametrize(("augment", "workers"), [(False, 0), (True, 0), (True, 1)])
def test_resumed_equals_uninterrupted(
    tmp_path: Path, arrays: str, augment: bool, workers: int
) -> None:
    # A worker is asked for its first batch before the Trainer tells the round.
    given = {"augment": augment, "workers": workers}
    whole, part = resumed(tmp_path, lambda: clients(arrays, **given))
    assert len(part.seen) == 1
    assert_same(part.seen[0]["state"], whole.seen[2]["state"])
    assert part.seen[0]["step"] == 3


class Transformed(L.LightningDataModule):
    """Clients whose images torchvision crops and flips at random."""

    def __init__(self, path: str) -> None:
        super().__init__()
        source = clients(path)
        source.setup()
        images = source.data.train_dataset
        change = Compose([RandomCrop(6, padding=2), RandomHorizontalFlip()])
        self.train = ClientDataset(
            ImageDataset(
                ImageArrays(images.images, images.targets),
                images.mean,
                images.std,
                augment=change,
            ),
            [source.train_dataset.indices[part] for part in source.train_dataset.parts],
        )

    def train_dataloader(self) -> DataLoader[Any]:
        sampler = RoundSampler(self.train.parts, share=0.6, seed=1)
        return DataLoader(self.train, batch_sampler=sampler)


def test_resumed_equals_uninterrupted_with_torchvision_transforms(
    tmp_path: Path, arrays: str
) -> None:
    whole, part = resumed(tmp_path, lambda: Transformed(arrays))
    assert_same(part.seen[0]["state"], whole.seen[2]["state"])
    plain = run(tmp_path / "plain", arrays)
    names = ["model.0.weight", "model.5.weight"]
    for name in names:
        assert not torch.equal(
            part.seen[0]["state"][name], plain.seen[2]["state"][name]
        )


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


def test_other_batches_are_refused(tmp_path: Path, arrays: str) -> None:
    with pytest.raises(TypeError, match="ClientsDataModule"):
        trainer(tmp_path, 1).fit(module(), datamodule=ArrayDataModule(arrays))


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
        ({"buffers": "lost"}, "'averaged', 'kept', got 'lost'"),
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
