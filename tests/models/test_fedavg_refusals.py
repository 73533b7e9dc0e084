"""What a Trainer may and may not do around federated averaging."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch.callbacks as lightning_callbacks
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
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)

from leakwatch.callbacks import GradientDefense
from leakwatch.defenses import Budget, GaussianNoise
from leakwatch.federated import FederatedAveraging, LocalTraining
from leakwatch.models import FedAvgModule

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:.*Using bfloat16 Automatic Mixed Precision:UserWarning",
    "ignore:You passed .*precision='16-mixed':UserWarning",
)


@pytest.fixture
def arrays(tmp_path: Path) -> str:
    return write_arrays(tmp_path)


@contextmanager
def process_group() -> Iterator[None]:
    """Ends a process group that a run has left behind, and forgets its address."""
    with patch.dict(os.environ):
        try:
            yield
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


class OwnDefense(GradientDefense):
    pass


class Thaw(BaseFinetuning):
    def freeze_before_training(self, pl_module: LightningModule) -> None:
        pass

    def finetune_function(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("callback", "text"),
    [
        (lambda: GradientDefense(GaussianNoise(Budget(1.0))), "clients share weights"),
        (lambda: OwnDefense(GaussianNoise(Budget(1.0))), "clients share weights"),
        (lambda: StochasticWeightAveraging(0.1), "remove it, or average the server's"),
        (lambda: GradientAccumulationScheduler({1: 2}), "give batch_size of FedAvg"),
        (lambda: LearningRateFinder(), "give lr of FedAvgModule"),
        (lambda: BatchSizeFinder(), "give batch_size of FedAvgModule"),
        (lambda: ModelPruning("l1_unstructured"), "prune the network before training"),
        (lambda: Thaw(), "Thaw gives thawed layers.*freeze layers with"),
    ],
)
def test_callbacks_that_act_behind_the_clients_are_refused(
    tmp_path: Path, arrays: str, callback: Any, text: str
) -> None:
    fit = trainer(tmp_path, 1, callback())
    with pytest.raises(RuntimeError, match=text):
        fit.fit(module(), datamodule=clients(arrays))
    assert fit.global_step == 0


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"gradient_clip_val": 1.0}, "Remove `Trainer(gradient_clip_val=1.0)`"),
        ({"accumulate_grad_batches": 2}, "Remove `Trainer(accumulate_grad_batches=2)`"),
    ],
)
def test_what_lightning_refuses_itself(
    tmp_path: Path, arrays: str, setting: dict[str, Any], text: str
) -> None:
    fit = trainer(tmp_path, 1, **setting)
    with pytest.raises(MisconfigurationException, match=re.escape(text)):
        fit.fit(module(), datamodule=clients(arrays))


def test_ddp_on_one_device_is_refused(tmp_path: Path, arrays: str) -> None:
    strategy = DDPStrategy(process_group_backend="gloo")
    fit = trainer(tmp_path, 1, strategy=strategy, devices=1)
    with (
        process_group(),
        pytest.raises(RuntimeError, match=r"has DDPStrategy.*strategy='auto'"),
    ):
        fit.fit(module(), datamodule=clients(arrays))


@pytest.mark.parametrize("strategy", [FSDPStrategy, ModelParallelStrategy])
def test_sharded_strategies_are_refused(tmp_path: Path, strategy: Any) -> None:
    # A Trainer without a GPU refuses these itself, so one is put in its place.
    net = module()
    net.trainer = trainer(tmp_path, 1)
    net.trainer._accelerator_connector.strategy = strategy()
    with pytest.raises(RuntimeError, match=f"has {strategy.__name__}.*devices=1"):
        net.setup("fit")


def test_several_processes_and_scalers_are_refused(tmp_path: Path) -> None:
    net = module()
    net.trainer = trainer(tmp_path, devices=2)
    with pytest.raises(RuntimeError, match="the Trainer has 2; use devices=1"):
        net.setup("fit")
    net.setup("validate")
    net.trainer = trainer(tmp_path, 1)
    net.setup("fit")
    net.trainer.precision_plugin.scaler = object()
    with pytest.raises(RuntimeError, match="precision='32-true'"):
        net.setup("fit")


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_half_precision_is_refused(tmp_path: Path, arrays: str, precision: Any) -> None:
    fit = trainer(tmp_path, 1, precision=precision)
    with pytest.raises(RuntimeError, match=rf"precision='{precision}' \(HalfPrecis"):
        fit.fit(module(), datamodule=clients(arrays))


def test_a_network_in_half_precision_is_refused(tmp_path: Path, arrays: str) -> None:
    net = FedAvgModule(network().bfloat16(), **LOCAL, num_classes=3)
    with pytest.raises(ValueError, match=r"torch\.bfloat16.*precision='32-true'"):
        trainer(tmp_path, 1).fit(net, datamodule=clients(arrays))


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_clients_train_in_full_precision_under_autocast(
    tmp_path: Path, arrays: str, precision: str
) -> None:
    plain = run(tmp_path / "plain", arrays)
    mixed = run(tmp_path / "mixed", arrays, settings={"precision": precision})
    for found, expected in zip(mixed.seen, plain.seen, strict=True):
        assert_same(found["state"], expected["state"])


def test_double_precision_equals_the_plain_simulation(
    tmp_path: Path, arrays: str
) -> None:
    look = run(tmp_path, arrays, settings={"precision": "64-true"})
    data = clients(arrays)
    data.setup()
    net = network().double()
    server = FederatedAveraging(
        net,
        [(x.double(), y) for x, y in data.clients],
        LocalTraining(**LOCAL),
        share=0.6,
        seed=1,
        freeze_batchnorm=False,
    )
    for seen, _ in zip(look.seen, server.run(ROUNDS), strict=True):
        state = seen["state"]
        own = {k[6:]: v for k, v in state.items() if k.startswith("model.")}
        assert_same(own, dict(net.state_dict()))


class Final(Callback):
    """The module's weights when training has ended."""

    weights: torch.Tensor

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = [p.detach().reshape(-1) for p in pl_module.parameters()]
        self.weights = torch.cat(found)


@pytest.mark.skipif(
    not hasattr(lightning_callbacks, "EMAWeightAveraging"), reason="Lightning < 2.6"
)
def test_averaging_over_rounds_leaves_the_rounds_alone(
    tmp_path: Path, arrays: str
) -> None:
    plain = run(tmp_path / "plain", arrays)
    final = Final()
    ema = lightning_callbacks.EMAWeightAveraging(decay=0.75)
    averaged = run(tmp_path / "averaged", arrays, ema, final)
    names = [name for name, _ in module().named_parameters()]
    rounds = []
    for found, expected in zip(averaged.seen, plain.seen, strict=True):
        assert_same(found["state"], expected["state"])
        rounds.append(torch.cat([expected["state"][n].reshape(-1) for n in names]))
    mean = rounds[0]
    for weights in rounds[1:]:
        mean = 0.75 * mean + 0.25 * weights
    torch.testing.assert_close(final.weights, mean, rtol=1e-6, atol=1e-7)


def test_monitors_read_the_clients_learning_rate(tmp_path: Path, arrays: str) -> None:
    monitor, look = LearningRateMonitor(), Look()
    fit = trainer(tmp_path, 2, monitor, look, logger=CSVLogger(tmp_path))
    fit.fit(module(), datamodule=clients(arrays))
    (read,) = monitor.lrs.values()
    assert set(read) == {LOCAL["lr"]}
    assert fit.global_step == 2
