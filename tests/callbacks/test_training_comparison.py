"""What training shares is what is scored, or the record says that it is not."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from monitor_cases import CLASSES, Tiny, dataset, fit, flat, loader, monitor, rows_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset, default_collate

import leakwatch
from leakwatch import ProbeSet
from leakwatch.callbacks import GradientDefense, InversionAudit
from leakwatch.callbacks._probing.training_gradient import inputs_differ, verdict
from leakwatch.defenses import Budget, GaussianNoise
from leakwatch.reporting import RiskLedger, write_report

MEAN, STD = 0.5, 0.05


def cautions(
    root: Path, module: L.LightningModule, watched: Any = None, **changes: Any
) -> list[str]:
    """What is said beside the headline; each is one warning as well."""
    watched = watched or monitor(at_start=False, scores=["norms"])
    callbacks = [watched, *changes.pop("callbacks", ())]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(root, *callbacks, module=module, **changes)
    metadata = RiskLedger.open(watched.run_directory).read_metadata()
    said = metadata.get("training", [])
    warned = [str(w.message) for w in caught if str(w.message).startswith("leakwatch:")]
    assert warned == [f"leakwatch: {text}" for text in said]
    return said


def net(*, width: int = 6, norm: bool = False, drop: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(16, width),
        nn.BatchNorm1d(width) if norm else nn.Identity(),
        nn.Sigmoid(),
        nn.Dropout(drop),
        nn.Linear(width, CLASSES),
    )


# -- agreement is silent ---------------------------------------------------------------


class Draws(Tiny):
    """Uses its random stream before the network does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        torch.rand(3)
        return F.cross_entropy(self(batch[0]), batch[1])


class Checkpointed(Tiny):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.net, x, use_reentrant=False)
        return out


class TwoOptimizers(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        parts = self.net[1], self.net[3]
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]


class ByHand(Tiny):
    """Updates without an optimiser; its gradients stay until the next batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.zero_grad()
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        with torch.no_grad():
            for p in self.parameters():
                p -= 0.1 * p.grad

    def configure_optimizers(self) -> None:
        return None


class WithLBFGS(Tiny):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Mapped(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["image"]), batch["label"])


def mapped(items: list[Any]) -> dict[str, Tensor]:
    x, y = default_collate(items)
    return {"image": x, "label": y}


def tied() -> nn.Sequential:
    layers = net(width=16)
    layers[5] = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, CLASSES))
    layers[5][0].weight = layers[1].weight
    return layers


def frozen() -> nn.Sequential:
    layers = net()
    layers[1].requires_grad_(False)
    return layers


def spectral() -> nn.Sequential:
    layers = net()
    nn.utils.parametrizations.spectral_norm(layers[1])
    return layers


DEFENSE = GradientDefense(GaussianNoise(Budget(1.0, "std")))


@pytest.mark.parametrize(
    ("module", "changes"),
    [
        (Tiny, {}),
        (lambda: Tiny(net(norm=True)), {}),
        (lambda: Tiny(net(drop=0.5)), {}),
        (lambda: Draws(net(drop=0.5, width=30)), {}),
        (lambda: Blurred(), {}),
        (lambda: Tiny(net(norm=True, drop=0.5)), {"max_epochs": 3}),
        (Checkpointed, {}),
        (lambda: Tiny(tied()), {}),
        (lambda: Tiny(frozen()), {}),
        (lambda: Tiny(spectral()), {}),
        (TwoOptimizers, {}),
        (ByHand, {}),
        (WithLBFGS, {}),
        (Tiny, {"accumulate_grad_batches": 4}),
        (Tiny, {"gradient_clip_val": 0.01}),
        (Tiny, {"precision": "bf16-mixed"}),
        (lambda: Tiny(net(drop=0.5)), {"precision": "bf16-mixed"}),
        (Tiny, {"precision": "64-true"}),
        (Tiny, {"callbacks": [L.pytorch.callbacks.EMAWeightAveraging()]}),
        (Tiny, {"callbacks": [DEFENSE]}),
        (TwoOptimizers, {"callbacks": [DEFENSE]}),
        (Mapped, {"data": DataLoader(dataset(), 4, collate_fn=mapped)}),
    ],
)
def test_nothing_is_said_where_training_shares_what_is_scored(
    tmp_path: Path, module: Any, changes: dict[str, Any]
) -> None:
    L.seed_everything(1, verbose=False)
    assert cautions(tmp_path, module(), **changes) == []


@pytest.mark.parametrize("criterion", [None, "training_step"])
@pytest.mark.parametrize("layers", [{"norm": True, "drop": 0.3}, {}])
def test_comparing_leaves_training_alone_to_the_last_bit(
    tmp_path: Path, layers: dict[str, Any], criterion: Any
) -> None:
    def weights(*callbacks: Any) -> list[list[float]]:
        L.seed_everything(3, verbose=False)
        module = Draws(net(**layers))
        fit(tmp_path, *callbacks, module=module, max_epochs=2)
        return flat([*module.parameters(), *module.buffers()])

    watched = monitor(criterion=criterion, scores=["norms"])
    assert weights(watched) == weights()


class DrawsByItself(Tiny):
    """Leaves out units by a random stream of its own, which its step uses as well."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.streams: dict[str, Any] = {
            "torch": torch.Generator().manual_seed(5),
            "numpy": np.random.default_rng(5),
        }
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        h = self.net[2](self.net[1](x.flatten(1)))
        if self.training:
            h = h * (self.draw(h.shape) > 0.3) / 0.7
        out: Tensor = self.net[3](h)
        return out

    def draw(self, shape: torch.Size) -> Tensor:
        stream = self.streams[self.kind]
        if self.kind == "numpy":
            return torch.from_numpy(stream.random(tuple(shape)))
        return torch.rand(shape, generator=stream)


class DrawsFirst(DrawsByItself):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.draw(torch.Size([3]))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("module", [DrawsByItself, DrawsFirst])
def test_streams_of_its_own_are_left_alone(
    tmp_path: Path, kind: str, module: type[DrawsByItself]
) -> None:
    L.seed_everything(3, verbose=False)
    watched, alone = module(kind), module(kind)
    alone.load_state_dict(watched.state_dict())
    data = loader(shuffle=False)
    assert cautions(tmp_path / "a", watched, data=data, max_epochs=2) == []
    fit(tmp_path / "b", module=alone, data=data, max_epochs=2)
    assert flat(watched.parameters()) == flat(alone.parameters())


class Counting(DrawsByItself):
    def __init__(self) -> None:
        super().__init__("torch")
        self.numbers = itertools.count()

    def draw(self, shape: torch.Size) -> Tensor:
        return torch.full(shape, 0.1 * (next(self.numbers) % 7))


def test_a_module_with_an_iterator_is_not_evaluated_in_training_mode(
    tmp_path: Path,
) -> None:
    L.seed_everything(3, verbose=False)
    watched, alone = Counting(), Counting()
    alone.load_state_dict(watched.state_dict())
    data = loader(shuffle=False)
    (said,) = cautions(tmp_path / "a", watched, data=data)
    assert "could not be found out: the module holds an iterator (numbers)" in said
    fit(tmp_path / "b", module=alone, data=data)
    assert flat(watched.parameters()) == flat(alone.parameters())


# -- several steps in a batch ----------------------------------------------------------


class TwoLosses(TwoOptimizers):
    """The second part learns by another loss, after the first has taken its step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for optimizer, loss in zip(
            self.optimizers(), (F.cross_entropy, F.multi_margin_loss), strict=True
        ):
            self.zero_grad()
            self.manual_backward(loss(self(x), y))
            optimizer.step()


class Twice(TwoLosses):
    """One optimiser takes both steps."""

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return [super().optimizers()] * 2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("module", [TwoLosses, Twice])
def test_several_gradients_in_a_batch_are_said(
    tmp_path: Path, module: type[Tiny]
) -> None:
    (said,) = cautions(tmp_path, module())
    assert said.startswith("a training step takes several optimiser steps, each with")


class SecondTurned(TwoOptimizers):
    """The gradient that the second optimiser gets is another one."""

    def on_after_backward(self) -> None:
        for p in self.net[3].parameters():
            p.grad.neg_()


def test_what_a_second_optimiser_gets_is_compared_too(tmp_path: Path) -> None:
    (said,) = cautions(tmp_path, SecondTurned())
    assert "is not that of the criterion on the same batch" in said


def test_closures_that_are_called_again_are_one_step(tmp_path: Path) -> None:
    class Closure(Twice):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()[0]

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(self(batch[0]), batch[1])
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    assert cautions(tmp_path, Closure()) == []


# -- another loss ----------------------------------------------------------------------


class OneVersusRest(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        target = F.one_hot(batch[1], CLASSES).float()
        return F.binary_cross_entropy_with_logits(self(batch[0]), target)


class ZeroHead(OneVersusRest):
    """Its losses are log 3 and log 2 for every sample: only gradients tell."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.net[3].weight)
        nn.init.zeros_(self.net[3].bias)


class Smoothed(ZeroHead):
    """At zero logits its gradient is 0.9 times that of cross-entropy, later not."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], label_smoothing=0.1)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.1)


class NormalizedInStep(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self((batch[0] - MEAN) / STD), batch[1])


class HeadOutside(Tiny):
    """``forward`` gives an embedding, of which the loss is made elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(CLASSES, CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        away = torch.cdist(self(batch[0]), self.prototypes)
        loss = F.cross_entropy(-away.square(), batch[1])
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize(
    "module", [OneVersusRest, ZeroHead, Smoothed, NormalizedInStep, HeadOutside]
)
def test_another_loss_is_said_once_beside_the_headline(
    tmp_path: Path, module: type[Tiny]
) -> None:
    watched = monitor(at_start=False, scores=["norms"])
    (said,) = cautions(tmp_path, module(), watched, data=loader(n=60))
    assert said.startswith("the gradient that training uses is not that of the criter")
    assert "criterion=" in said
    assert "prepare=" in said
    if module is OneVersusRest:
        assert watched.run_directory is not None
        page = write_report(watched.run_directory).read_text()
        head, _, _ = page.partition("<section")
        assert "The gradient that training uses is not that of the criterion" in head


class AnotherLater(Tiny):
    """Changes its loss after a warm-up, in a batch that is not among the first ones."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.current_epoch < 1:
            return F.cross_entropy(self(batch[0]), batch[1])
        target = F.one_hot(batch[1], CLASSES).float()
        return F.binary_cross_entropy_with_logits(self(batch[0]), target)


def test_a_loss_that_changes_is_seen_after_the_next_probe(tmp_path: Path) -> None:
    # Messages 0, 1, 3 and 10 would be compared anyway, and 4 to 7 are of another loss.
    few = {"data": loader(n=16), "max_epochs": 2}
    (said,) = cautions(tmp_path, AnotherLater(), **few)
    assert said.startswith("the gradient that training uses is not that of the criter")
    accumulated = {"accumulate_grad_batches": 2, "max_epochs": 4, "data": loader(n=24)}
    assert cautions(tmp_path, Tiny(), **accumulated) == []


class Deployed(Tiny):
    """Gives probabilities where it is used, as many modules do."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits if self.training else logits.softmax(1)


class Cooled(Tiny):
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits if self.training else logits / 3


class Blurred(Tiny):
    """Draws in training alone, as augmentations and dropout do."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x + torch.randn_like(x) if self.training else x)
        return out


@pytest.mark.parametrize("module", [Deployed, Cooled])
def test_another_network_in_evaluation_mode_is_said(
    tmp_path: Path, module: type[Tiny]
) -> None:
    (said,) = cautions(tmp_path, module())
    assert said.startswith("in evaluation mode, in which it is scored, the network")
    assert "criterion=" in said


class Focal(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        return ((1 - (-losses).exp()) ** 2 * losses).mean()


@pytest.mark.parametrize("module", [OneVersusRest, Focal, NormalizedInStep])
@pytest.mark.parametrize("batches", [1, 2])
def test_dropout_hides_no_other_loss(
    tmp_path: Path, module: type[Tiny], batches: int
) -> None:
    (said,) = cautions(
        tmp_path,
        module(net(drop=0.5)),
        data=loader(n=60),
        accumulate_grad_batches=batches,
    )
    assert said.startswith("the gradient that training uses is not that of the criter")


class SometimesTurned(Tiny):
    """Every other batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] if batch_idx % 2 else batch[0].flip(-1)
        return F.cross_entropy(self(x), batch[1])


def test_equal_weights_of_classes_explain_nothing(tmp_path: Path) -> None:
    (said,) = cautions(tmp_path, SometimesTurned(), data=loader(n=12))
    assert said.startswith("the gradient that training uses is not that of the criter")


class SlightlySmoothed(Tiny):
    """The gradient of each class is nearly a multiple of that of cross-entropy."""

    smoothing = 0.02

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        smoothing = self.smoothing
        return F.cross_entropy(self(batch[0]), batch[1], label_smoothing=smoothing)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


class MoreSmoothed(SlightlySmoothed):
    smoothing = 0.1


class SlightlyShifted(SlightlySmoothed):
    """Its images are brighter by less than a level in twenty."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0] + 0.04), batch[1])


@pytest.mark.parametrize("module", [SlightlySmoothed, MoreSmoothed, SlightlyShifted])
@pytest.mark.parametrize("size", [4, 12])
@pytest.mark.parametrize("seed", [1, 2])
def test_what_nearly_is_a_factor_is_none(
    tmp_path: Path, module: type[Tiny], size: int, seed: int
) -> None:
    L.seed_everything(seed, verbose=False)
    watched = monitor(at_start=False, scores=["norms"])
    data = loader(n=60, batch_size=size)
    (said,) = cautions(tmp_path, module(), watched, data=data, max_epochs=3)
    assert said.startswith("the gradient that training uses is not that of the criter")
    assert "weights of classes" not in said
    assert "of its size, beyond any factor of all samples or of a class" in said
    # No score is of a factor that is none.
    assert watched.state_dict()["factors"] == {}


def binary(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits: Tensor = module(x)
    target = F.one_hot(y, CLASSES).to(logits)
    return F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(1)


def test_the_right_criterion_is_not_objected_to(tmp_path: Path) -> None:
    watched = monitor(at_start=False, criterion=binary)
    assert cautions(tmp_path, OneVersusRest(), watched) == []


def test_a_preparation_of_the_training_step_can_be_stated(tmp_path: Path) -> None:
    watched = monitor(
        at_start=False, prepare=lambda x: (x - MEAN) / STD, scores=["bayes"]
    )
    module = NormalizedInStep()
    assert cautions(tmp_path, module, watched) == []
    assert_scored_as_normalized(watched, module)


def test_training_step_is_a_criterion(tmp_path: Path) -> None:
    watched = monitor(at_start=False, criterion="training_step", dtype="float64")
    module = HeadOutside()
    assert cautions(tmp_path, module, watched) == []

    def distances(m: Any, x: Tensor, y: Tensor) -> Tensor:
        away = torch.cdist(m(x), m.prototypes)
        return F.cross_entropy(-away.square(), y, reduction="none")

    probes = watched.probes
    assert probes is not None
    right = leakwatch.score(
        module, probes.x, probes.y, "lavp", criterion=distances, dtype=torch.float64
    )
    last = [r.value for r in rows_of(watched) if r.quantity == "lavp_l2_max"][-3:]
    torch.testing.assert_close(
        torch.tensor(last, dtype=torch.float64), right["lavp_l2_max"], rtol=1e-8, atol=0
    )


def test_training_step_needs_automatic_optimization(tmp_path: Path) -> None:
    watched = monitor(criterion="training_step")
    with pytest.raises(TypeError, match="needs a LightningModule in automatic"):
        fit(tmp_path, watched, module=TwoOptimizers())


class Hooked(Tiny):
    """A hook of the module multiplies gradients, and turns one of them."""

    def __init__(self, turned: float) -> None:
        super().__init__(net(drop=0.3))
        self.turned = turned

    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.grad.mul_(20)
        self.net[5].bias.grad.mul_(self.turned)


class Backward(Tiny):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (20 * loss).backward()


@pytest.mark.parametrize(
    ("module", "how"),
    [
        (lambda: Hooked(1), "is 20 times that of the criterion"),
        (Backward, "is 20 times that of the criterion"),
        (lambda: Hooked(-1), "is not that of its training step's loss"),
        (lambda: Tiny(net(norm=True, drop=0.3)), ""),
        (OneVersusRest, ""),
    ],
)
def test_what_becomes_of_the_gradient_of_a_training_step_is_said(
    tmp_path: Path, module: Any, how: str
) -> None:
    L.seed_everything(1, verbose=False)
    watched = monitor(at_start=False, criterion="training_step", scores=["norms"])
    said = cautions(tmp_path, module(), watched)
    assert len(said) == bool(how)
    assert all(how in text for text in said)


class HeadAlone(Tiny):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[3].parameters(), lr=0.1)


def test_parameters_without_an_optimiser_are_said(tmp_path: Path) -> None:
    (said,) = cautions(tmp_path / "all", HeadAlone())
    assert "parameters that no optimiser has (2, the first net.1.weight)" in said
    head = monitor(at_start=False, scores=["norms"], parameters="net.3.*")
    assert cautions(tmp_path / "head", HeadAlone(), head) == []
    frozen = HeadAlone()
    frozen.net[1].requires_grad_(False)
    assert cautions(tmp_path / "frozen", frozen) == []


class Half(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1]) / 2


class Almost(Tiny):
    """Near enough to 1 to be taken for it, were it not a factor to the last digit."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 0.98 * F.cross_entropy(self(batch[0]), batch[1])


class Sum(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="sum") / 100 * 100


class HalfSum(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="sum") / 2


WEIGHTS = torch.tensor([1.0, 3.0, 0.5])


class WeightedMean(Tiny):
    """As torch has it: a batch is divided by the sum of its weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], weight=WEIGHTS)


class WeightedSum(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y, weight=WEIGHTS, reduction="sum")


class WeightedEach(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        return (WEIGHTS[batch[1]] * losses).mean()


class Ignoring(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], ignore_index=1)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Half, "is 0.5 times that of the criterion"),
        (Almost, "is 0.98 times that of the criterion"),
        (HalfSum, "is 0.5 times that of the criterion"),
        (Sum, "adds the losses of a batch up"),
        (Ignoring, "of classes (0: 1, 1: 0, 2: 1) and divides by the weights"),
        (WeightedMean, "of classes (0: 2, 1: 6, 2: 1) and divides by the weights"),
        (WeightedEach, "of classes (0: 1, 1: 3, 2: 0.5); scores after step"),
        (WeightedSum, "of classes (0: 1, 1: 3, 2: 0.5); scores after step"),
    ],
)
def test_a_constant_factor_is_said(
    tmp_path: Path, module: type[Tiny], words: str
) -> None:
    (said,) = cautions(tmp_path, module(), data=loader(n=62), max_epochs=2)
    assert words in said


def test_dropout_hides_no_factor(tmp_path: Path) -> None:
    (said,) = cautions(tmp_path, Half(net(drop=0.5)), data=loader(n=62), max_epochs=2)
    assert "is 0.5 times that of the criterion" in said


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (WeightedMean, "of classes (0: 2, 1: 6, 2: 1) and divides by the weights"),
        (WeightedEach, "of classes (0: 1, 1: 3, 2: 0.5); scores after step"),
        (WeightedSum, "of classes (0: 1, 1: 3, 2: 0.5); scores after step"),
    ],
)
@pytest.mark.parametrize("batches", [2, 5])
def test_weights_of_classes_are_found_in_accumulated_gradients(
    tmp_path: Path, module: type[Tiny], words: str, batches: int
) -> None:
    (said,) = cautions(
        tmp_path, module(), data=loader(n=62), max_epochs=2,
        accumulate_grad_batches=batches,
    )  # fmt: skip
    assert words in said


def alone(module: L.LightningModule, x: Tensor, y: Tensor) -> Tensor:
    """The losses of batches of one, as the training step has them."""
    steps = [
        module.training_step([x[i : i + 1], y[i : i + 1]], 0) for i in range(len(x))
    ]
    return torch.stack(steps)


@pytest.mark.parametrize("module", [Half, HalfSum, Sum, WeightedEach, WeightedSum])
def test_scores_are_of_the_gradient_with_its_factor(
    tmp_path: Path, module: type[Tiny]
) -> None:
    names = ["grad_norm", "i2f_bayes_psnr", "lavp_l2_max"]
    watched = monitor(scores=["norms", "bayes", "lavp"], noise_std=1e-2)
    trained = module()
    cautions(tmp_path, trained, watched, data=loader(n=62))
    trained.log = lambda *_, **__: None
    probes = watched.probes
    assert probes is not None
    right = leakwatch.score(
        trained, probes.x, probes.y, ["norms", "bayes", "lavp"], criterion=alone,
        noise_std=1e-2, prior_std=probes.prior_std, prior_mean=probes.prior_mean,
    )  # fmt: skip
    for name in names:
        rows = [r for r in rows_of(watched) if r.quantity == name][-len(probes) :]
        assert [r.status for r in rows] == [str(s) for s in right.status[name]]
        torch.testing.assert_close(
            torch.tensor([r.value for r in rows]).double(),
            right[name].double(), rtol=0.02, atol=0.1,
        )  # fmt: skip
    # Before the first step nothing was known.
    rows = [r for r in rows_of(watched) if r.quantity == "grad_norm"][: len(probes)]
    factors = RiskLedger.open(watched.run_directory).read_metadata().get("loss_factors")
    assert {r.step for r in rows} == {0}
    assert (factors is None) == (module is Sum)


class Focal(Tiny):
    """Weighs each sample by what it is worth: no class has a weight."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        return ((1 - (-losses).exp()) ** 2 * losses).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.1)


@pytest.mark.parametrize(("size", "batches"), [(2, 1), (12, 1), (2, 3), (6, 2)])
def test_factors_of_single_samples_are_no_weights_of_classes(
    tmp_path: Path, size: int, batches: int
) -> None:
    data = loader(n=60, batch_size=size)
    (said,) = cautions(
        tmp_path, Focal(), data=data, max_epochs=3, accumulate_grad_batches=batches
    )
    assert said.startswith("the gradient that training uses is not that of the criter")
    assert "weights of classes" not in said
    assert "pass criterion=" in said


def focal(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(module(x), y, reduction="none")
    return (1 - (-losses).exp()) ** 2 * losses


@pytest.mark.parametrize("criterion", [focal, "training_step"])
@pytest.mark.parametrize("batches", [1, 3])
def test_what_the_warning_asks_for_ends_it(
    tmp_path: Path, criterion: Any, batches: int
) -> None:
    watched = monitor(at_start=False, criterion=criterion)
    data = loader(n=60)
    assert not cautions(
        tmp_path, Focal(), watched, data=data, accumulate_grad_batches=batches
    )


def test_factors_are_part_of_a_checkpoint(tmp_path: Path) -> None:
    first = monitor(at_start=False, scores=["norms"])
    cautions(tmp_path, WeightedEach(), first, data=loader(n=62))
    factors = {"all": 1.0, "0": 1.0, "1": 3.0, "2": 0.5}
    assert first.state_dict()["factors"] == pytest.approx(factors, rel=1e-3)
    metadata = RiskLedger.open(first.run_directory).read_metadata()
    assert metadata["loss_factors"] == pytest.approx(factors, rel=1e-3)


def test_a_batch_without_labels_can_not_be_compared(tmp_path: Path) -> None:
    class Pairs(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self(batch["left"]), batch["kind"])

    def pairs(items: list[Any]) -> dict[str, Tensor]:
        x, y = default_collate(items)
        return {"left": x, "right": x, "kind": y}

    (said,) = cautions(
        tmp_path, Pairs(), data=DataLoader(dataset(), 4, collate_fn=pairs)
    )
    assert "could not be found out" in said
    assert "inputs and labels are not found" in said


# -- preparation of batches ------------------------------------------------------------


def assert_scored_as_normalized(watched: Any, module: nn.Module) -> None:
    probes = watched.probes
    assert probes.mean is None
    assert probes.x.amin() >= 0
    right = leakwatch.score(
        module,
        (probes.x - MEAN) / STD,
        probes.y,
        "bayes",
        noise_std=1e-4,
        mean=[MEAN],
        std=[STD],
        prior_std=probes.prior_std,
        prior_mean=probes.prior_mean,
    )
    name = "i2f_bayes_psnr"
    last = [r.value for r in rows_of(watched) if r.quantity == name][-len(probes) :]
    torch.testing.assert_close(
        torch.tensor(last).double(), right[name], rtol=1e-4, atol=0
    )


class Normalizing(Tiny):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return (x - MEAN) / STD, y


class NormalizingOnTheWay(Tiny):
    def transfer_batch_to_device(self, batch: Any, device: Any, index: int) -> Any:
        x, y = super().transfer_batch_to_device(batch, device, index)
        return (x - MEAN) / STD, y


class NormalizingMaps(Mapped):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch | {"image": (batch["image"] - MEAN) / STD}


class NormalizingData(L.LightningDataModule):
    """Its images are raw; its hook applies the normalisation that it states."""

    mean, std = (MEAN,), (STD,)

    def train_dataloader(self) -> Any:
        return loader()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [(batch[0] - MEAN) / STD, batch[1]]


def normalizing(items: list[Any]) -> list[Tensor]:
    x, y = default_collate(items)
    return [(x - MEAN) / STD, y]


@pytest.mark.parametrize(
    ("module", "data", "options"),
    [
        (Normalizing, None, {}),
        (NormalizingOnTheWay, None, {}),
        (Normalizing, None, {"mean": [MEAN], "std": [STD]}),
        (NormalizingMaps, DataLoader(dataset(), 4, collate_fn=mapped), {}),
        (Tiny, NormalizingData(), {}),
        (Tiny, DataLoader(dataset(), 4, collate_fn=normalizing), {}),
    ],
)
def test_probes_go_through_what_the_run_does_to_batches(
    tmp_path: Path, module: type[Tiny], data: Any, options: dict[str, Any]
) -> None:
    watched = monitor(at_start=False, scores=["bayes"], **options)
    trained = module()
    assert cautions(tmp_path, trained, watched, data=data) == []
    assert_scored_as_normalized(watched, trained)


def test_attacks_meet_the_prepared_gradient(tmp_path: Path) -> None:
    # A wrong preparation would leave a gradient that no image near the true one has.
    audit = InversionAudit(
        probes=2,
        attack=None,
        report=False,
        verbose=False,
        noise_std=1e-6,
        metrics=["psnr"],
    )
    fit(tmp_path, audit, module=Normalizing())
    values = [r.value for r in rows_of(audit) if r.quantity == "audit/near/psnr"]
    assert len(values) == 2
    assert min(values) > 35


class Augmenting(Tiny):
    """Brightens at random, and normalises."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return (x * (1 + 0.1 * torch.rand(len(x), 1, 1, 1)) - MEAN) / STD, y


def test_a_random_preparation_is_said_where_it_matters(tmp_path: Path) -> None:
    (said,) = cautions(tmp_path, Augmenting())
    assert "on_after_batch_transfer draws at random" in said
    assert "the training step gets inputs of " in said
    assert "prepare=" in said


def contrasts(n: int = 24) -> tuple[Tensor, Tensor]:
    """Images whose contrasts differ as those of photographs, and labels."""
    generator = torch.Generator().manual_seed(0)
    contrast = 0.15 * (0.35 * torch.randn(n, 1, 1, 1, generator=generator)).exp()
    light = 0.5 + 0.15 * torch.randn(n, 1, 1, 1, generator=generator)
    noise = torch.randn(n, 1, 4, 4, generator=generator)
    return (light + contrast * noise).clamp(0, 1), torch.arange(n) % CLASSES


def hooked(change: Any, owner: type[Any]) -> Any:
    """A module or data module whose hook changes inputs by ``(owner, x, y)``."""

    class Hooked(owner):  # type: ignore[misc]
        size = 4

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            x, y = batch
            return change(self, x, y), y

        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(*contrasts()), self.size, shuffle=True)

    return Hooked()


def noisy(_: Any, x: Tensor, y: Tensor) -> Tensor:
    return (x + 0.02 * torch.randn_like(x) - 0.5) / 0.5


def jittered(_: Any, x: Tensor, y: Tensor) -> Tensor:
    return x * (0.7 + 0.6 * torch.rand(len(x), 1, 1, 1))


def moved(_: Any, x: Tensor, y: Tensor) -> Tensor:
    shifted = F.pad(x, (1, 1, 1, 1)).roll(int(torch.randint(3, ())), 3)[..., 1:5, 1:5]
    return shifted.flip(3) if torch.rand(()) < 0.5 else shifted


def in_training(module: Any, x: Tensor, y: Tensor) -> Tensor:
    return (x - 0.5) / 0.5 if module.training else x


def by_label(_: Any, x: Tensor, y: Tensor) -> Tensor:
    return (x - 0.5) / torch.tensor([1.0, 0.25, 0.5])[y.to(x.device)].view(-1, 1, 1, 1)


@pytest.mark.parametrize(
    ("owner", "change", "why"),
    [
        (Tiny, noisy, "draws at random"),
        (L.LightningDataModule, noisy, "draws at random"),
        (Tiny, lambda o, x, y: noisy(o, jittered(o, x, y), y), "draws at random"),
        (Tiny, in_training, "does more to batches in training"),
        (Tiny, by_label, "does to a sample what depends on its label"),
        (Tiny, jittered, ""),
        (Tiny, moved, ""),
        (Tiny, lambda o, x, y: x.flip(3) if o.training else x, ""),
    ],
)
def test_another_range_is_said_where_statistics_of_a_batch_do_not_tell(
    tmp_path: Path, owner: type[Any], change: Any, why: str
) -> None:
    L.seed_everything(1, verbose=False)
    changing = hooked(change, owner)
    data = changing.train_dataloader() if owner is Tiny else changing
    said = cautions(tmp_path, changing if owner is Tiny else Tiny(), data=data)
    assert len(said) == bool(why)
    for text in said:
        assert f"on_after_batch_transfer {why} and turns inputs of " in text
        assert "prepare=" in text


def test_probes_that_are_prepared_already_are_not_objected_to(tmp_path: Path) -> None:
    data = hooked(noisy, L.LightningDataModule)
    x, y = contrasts()
    data.probe_dataset, data.size = TensorDataset((x - 0.5) / 0.5, y), len(x)
    watched = monitor(probes=8, at_start=False, scores=["norms"])
    data.mean = data.std = (0.5,)
    assert cautions(tmp_path, Tiny(), watched, data=data) == []


def test_streams_of_a_data_module_are_left_alone(tmp_path: Path) -> None:
    def weights(*callbacks: Any) -> list[float]:
        L.seed_everything(1, verbose=False)
        module, stream = Tiny(), torch.Generator().manual_seed(5)
        data = hooked(
            lambda _, x, y: x + 0.1 * torch.rand(x.shape, generator=stream),
            L.LightningDataModule,
        )
        fit(tmp_path, *callbacks, module=module, data=data)
        return flat(module.parameters())

    assert weights(monitor(scores=["norms"])) == weights()


def test_given_probes_are_inputs_of_the_network(tmp_path: Path) -> None:
    data = dataset()
    raw = ProbeSet.from_dataset(data, n=3)
    (said,) = cautions(
        tmp_path / "raw", Normalizing(), monitor(probes=raw, at_start=False)
    )
    assert said.startswith("the training step gets inputs of ")
    x, y = data.tensors
    right = ProbeSet.from_tensors((x[:3] - MEAN) / STD, y[:3], mean=[MEAN], std=[STD])
    watched = monitor(probes=right, at_start=False)
    assert cautions(tmp_path / "right", Normalizing(), watched) == []


# -- the comparisons themselves --------------------------------------------------------


def test_verdict_by_closed_form() -> None:
    g = torch.tensor([3.0, 4.0])
    across = torch.tensor([-4.0, 3.0])
    found = verdict(g + 0.5 * across, g, 0.01, 1e-4, 0.0)
    # Both scaled to one length, the angle between them is atan(1/2).
    gap = 2 * torch.tensor(0.5).atan().div(2).sin()
    assert not found.agrees
    assert found.gap == pytest.approx(float(gap), rel=1e-6)
    assert verdict(g + 0.5 * across, g, 0.01, 1e-4, spread=2.5).agrees
    assert verdict(1.005 * g, g, 0.01, 1e-4, 0.0).factor == 1
    assert verdict(0 * g, 0 * g, 0.01, 1e-4, 0.0).agrees
    assert not verdict(0 * g, g, 0.01, 1e-4, 0.0).agrees
    assert not verdict(-g, g, 0.01, 1e-4, 0.0).agrees
    # What is hidden beside the same length is not beside another.
    assert verdict(g + 0.002 * across, g, 0.01, 1e-4, 0.0).agrees
    assert not verdict(2 * g + 0.002 * across, g, 0.01, 1e-4, 0.0).agrees


def test_inputs_of_one_distribution_are_the_same_and_normalised_ones_not() -> None:
    generator = torch.Generator().manual_seed(0)
    brightness = torch.rand(400, 1, 1, 1, generator=generator)
    images = 0.5 * brightness + 0.5 * torch.rand(400, 1, 8, 8, generator=generator)
    for first in range(0, 60, 3):
        assert inputs_differ(images[first : first + 3], images[100:164]) == ""
    for scale, shift in ((2, -1), (4, -2), (20, -10)):
        text = inputs_differ(images[:8], scale * images[100:164] + shift)
        assert "mean ± standard deviation" in text
    assert "shape" in inputs_differ(images[:3], images[:3, :, :4])
