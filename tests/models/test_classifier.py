from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leakwatch.models import LeNet, LitClassifier, initialize

pytestmark = [
    # the loaders here hold a few images; workers would cost more than they save
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    # Lightning's own use of a PyTorch class that newer releases deprecate
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]
TINY: dict[str, Any] = {"num_classes": 3, "image_size": 8}


class TinyViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 8, 4, stride=4)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        logits: Tensor = self.head(self.block(tokens).mean(1))
        return logits


def data(n: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 3
    x = torch.rand(n, 1, 8, 8, generator=generator) + y.view(-1, 1, 1, 1)
    return x, y


def loader(n: int = 16) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*data(n)), batch_size=8)


def trainer(**kwargs: Any) -> L.Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
    }
    return L.Trainer(**{**quiet, **kwargs})


def test_forward_gives_logits() -> None:
    assert LitClassifier(**TINY)(data()[0]).shape == (16, 3)


def test_log_keys_and_values() -> None:
    torch.manual_seed(0)
    net = LitClassifier(**TINY, initialization="uniform")
    fit = trainer()
    fit.fit(net, loader(), loader(12))
    assert set(fit.logged_metrics) == {"train/loss", "train/acc", "val/loss", "val/acc"}
    x, y = data(12)
    net.eval()
    with torch.no_grad():
        logits = net(x)
    logged = fit.logged_metrics
    torch.testing.assert_close(
        logged["val/loss"], F.cross_entropy(logits, y), rtol=1e-5, atol=1e-6
    )
    accuracy = (logits.argmax(1) == y).float().mean()
    torch.testing.assert_close(logged["val/acc"], accuracy, rtol=1e-6, atol=1e-6)


def test_test_step_logs() -> None:
    run = trainer()
    (result,) = run.test(LitClassifier(**TINY), loader(), verbose=False)
    assert set(result) == {"test/loss", "test/acc"}


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("mlp", "adam"), ("mlp", "sgd"), ("resnet8", "adam"), ("vit", "adam")],
)
def test_training_lowers_the_loss(model: str, optimizer: Any) -> None:
    torch.manual_seed(0)
    net = LitClassifier(
        TinyViT() if model == "vit" else model, **TINY, optimizer=optimizer, lr=0.01
    )
    x, y = data()
    with torch.no_grad():
        before = F.cross_entropy(net.eval()(x), y)
    net.train()
    trainer(max_epochs=10).fit(net, loader(), loader())
    with torch.no_grad():
        after = F.cross_entropy(net.eval()(x), y)
    assert after < 0.9 * before


def test_optimizer_arguments_arrive() -> None:
    sgd = LitClassifier(
        **TINY, optimizer="sgd", lr=0.1, momentum=0.5, weight_decay=1e-3
    ).configure_optimizers()
    assert isinstance(sgd, torch.optim.SGD)
    group = sgd.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.1, 0.5, 1e-3)
    adam = LitClassifier(**TINY, lr=2e-3, weight_decay=0.01).configure_optimizers()
    assert isinstance(adam, torch.optim.Adam)
    group = adam.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (2e-3, 0.01)


def test_cosine_falls_to_zero_over_all_steps() -> None:
    net = LitClassifier(**TINY, optimizer="sgd", lr=0.1, scheduler="cosine")
    rates: list[float] = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    trainer(max_epochs=2, callbacks=[Watch()]).fit(net, loader(), loader())
    expected = [0.05 * (1 + math.cos(math.pi * t / 4)) for t in range(4)]
    assert rates == pytest.approx(expected)
    assert net.lr_schedulers().get_last_lr() == pytest.approx([0.0])


def test_cosine_needs_an_end() -> None:
    net = LitClassifier(**TINY, scheduler="cosine")

    with pytest.raises(ValueError, match="needs a Trainer with an end"):
        trainer(max_epochs=-1).fit(net, loader(), loader())


def test_initialization_is_applied_and_follows_the_global_seed() -> None:
    torch.manual_seed(3)
    net = LitClassifier(**TINY, initialization="uniform")
    torch.manual_seed(3)
    plain = initialize(LeNet(1, 3, 8), "uniform")
    for ours, theirs in zip(net.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert net.model.fc.weight.abs().max() > 0.45


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    net = LitClassifier(
        "mlp", {"hidden_sizes": [4], "activation": "tanh"}, **TINY, lr=0.02
    )
    run = trainer()
    run.fit(net, loader(), loader())
    path = tmp_path / "net.ckpt"
    run.save_checkpoint(path)
    again = LitClassifier.load_from_checkpoint(path)
    assert again.hparams == net.hparams
    assert again.hparams["model_args"] == {"hidden_sizes": [4], "activation": "tanh"}
    x, _ = data()
    assert torch.equal(again.eval()(x), net.eval()(x))


def test_own_module_round_trip(tmp_path: Path) -> None:
    net = LitClassifier(TinyViT(), **TINY)
    assert "model" not in net.hparams
    run = trainer()
    run.fit(net, loader(), loader())
    path = tmp_path / "net.ckpt"
    run.save_checkpoint(path)
    again = LitClassifier.load_from_checkpoint(path, model=TinyViT())
    x, _ = data()
    torch.testing.assert_close(again.eval()(x), net.eval()(x), rtol=0, atol=0)


def test_logits_of_another_width() -> None:
    net = LitClassifier(LeNet(1, 5, 8), **TINY)
    with pytest.raises(ValueError, match=r"\(8, 3\) for this batch, got \(8, 5\)"):
        trainer().fit(net, loader(), loader())


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"model": "vgg"}, ValueError, "registered: alexnet"),
        ({"model": 3}, TypeError, "model must be a registered name"),
        ({"model": LeNet(), "model_args": {"a": 1}}, ValueError, "built already"),
        ({"model_args": {"width": 2}}, ValueError, "no argument 'width'"),
        ({"num_classes": 1}, ValueError, "num_classes must be at least 2"),
        ({"in_channels": 0}, ValueError, "in_channels must be at least 1"),
        ({"image_size": -1}, ValueError, "image_size must be at least 1"),
        ({"initialization": "he"}, ValueError, "Unknown initialization 'he'"),
        ({"optimizer": "lion"}, ValueError, "'adam', 'sgd', got 'lion'"),
        ({"scheduler": "step"}, ValueError, "'none', 'cosine', got 'step'"),
        ({"lr": 0.0}, ValueError, "lr must be positive and finite, got 0.0"),
        ({"lr": math.nan}, ValueError, "lr must be positive and finite, got nan"),
        ({"lr": "1e-3"}, TypeError, "lr must be a number.*for instance lr=0.001"),
        ({"momentum": 1.0}, ValueError, r"momentum must lie in \[0, 1\)"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay must be at least 0"),
    ],
)
def test_bad_arguments(
    kwargs: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        LitClassifier(**kwargs)
