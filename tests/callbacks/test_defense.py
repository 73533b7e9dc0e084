"""GradientDefense: training is left alone otherwise, resumes, refuses, fails closed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from defense_cases import Known, Two, batches, inputs
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from monitor_cases import Tiny, dataset, fit, flat, streams
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader

from leakwatch.callbacks import GradientDefense, InversionAudit
from leakwatch.callbacks._defense.refusals import refuse_run
from leakwatch.callbacks._defense.samples import clip_factor
from leakwatch.callbacks._defense.step import Tally
from leakwatch.defenses import (
    DPSGD,
    Budget,
    Defense,
    EigenNoise,
    GaussianNoise,
    GradientPruning,
    MixUp,
)

NOISE = GaussianNoise(Budget(0.05, "std"))
KINDS = ("asked_norm", "applied_norm", "applied_std", "relative_norm", "seconds")


def weights(run: L.Trainer) -> list[list[float]]:
    assert run.model is not None
    return flat(list(run.model.parameters()))


# -- training is left alone ------------------------------------------------------------


@pytest.mark.parametrize(
    "defense",
    [GaussianNoise(Budget(0.0)), EigenNoise(Budget(0.0, "norm"), "input_space")],
)
def test_no_budget_is_no_defense_bit_by_bit(defense: Any, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"gradient_clip_val": 0.3, "limit_train_batches": 3}
    plain = weights(fit(tmp_path, **changes)), streams()
    watched = GradientDefense(defense)
    assert (weights(fit(tmp_path, watched, **changes)), streams()) == plain
    assert watched.summary.steps == 3


def test_noise_moves_weights_but_no_stream(tmp_path: Path) -> None:
    plain, before = weights(fit(tmp_path)), streams()
    run = fit(tmp_path, GradientDefense(NOISE))
    assert weights(run) != plain
    assert streams() == before
    assert set(run.logged_metrics) >= {f"defense/{kind}" for kind in KINDS}


def test_the_module_and_its_optimisers_are_given_back(tmp_path: Path) -> None:
    module = Tiny()
    run = fit(tmp_path, GradientDefense(NOISE), module=module)
    assert "configure_gradient_clipping" not in vars(module)
    assert len(run.optimizers[0]._optimizer_step_post_hooks) == 0


def test_a_hook_of_the_instance_is_called_first_and_put_back(tmp_path: Path) -> None:
    module = Known()
    seen: list[float] = []

    def own(optimizer: Any, **_: Any) -> None:
        assert module.layer.weight.grad is not None
        seen.append(float(module.layer.weight.grad.abs().max()))
        module.layer.weight.grad.zero_()

    vars(module)["configure_gradient_clipping"] = own
    data = batches(inputs(8), 2)
    fit(tmp_path, GradientDefense(NOISE), module=module, data=data)
    assert vars(module)["configure_gradient_clipping"] is own
    assert min(seen) > 0.1
    # Nothing but noise was left.
    assert float(torch.stack(module.recording.consumed).std()) < 0.07


# -- state -----------------------------------------------------------------------------


def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    # Every batch is the same: Lightning begins an epoch anew where it goes on with one.
    same: Any = ConcatDataset([dataset(4)] * 6)
    data: Any = DataLoader(same, 4)
    whole = GradientDefense(NOISE)
    save = ModelCheckpoint(
        tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1
    )
    expected = fit(
        tmp_path, whole, save, data=data, max_epochs=2,
        enable_checkpointing=True,
    )  # fmt: skip
    resumed = GradientDefense(NOISE)
    found = fit(
        tmp_path, resumed, data=data, max_epochs=2, seed=9,
        ckpt_path=tmp_path / "step=4.ckpt",
    )  # fmt: skip
    assert weights(found) == weights(expected)
    one, other = asdict(resumed.summary), asdict(whole.summary)
    assert one.pop("seconds") > 0
    assert other.pop("seconds") > 0
    assert one == other
    assert one["steps"] == 12


def test_another_fit_begins_anew(tmp_path: Path) -> None:
    watched = GradientDefense(NOISE)
    first = weights(fit(tmp_path, watched, limit_train_batches=2))
    assert weights(fit(tmp_path, watched, limit_train_batches=2)) == first
    assert watched.summary.steps == 2


# -- what is measured ------------------------------------------------------------------


class Meddler(Callback):
    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Any
    ) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)


def test_a_gradient_that_is_changed_afterwards_is_noticed(tmp_path: Path) -> None:
    watched = GradientDefense(NOISE)
    data = batches(inputs(2), 2)
    with pytest.warns(UserWarning, match=r"differs from what was drawn by \d"):
        fit(tmp_path, watched, Meddler(), module=Two(), data=data)
    assert watched.summary.mismatch > 0.4


def test_noise_that_is_rounded_away_is_noticed(tmp_path: Path) -> None:
    watched = GradientDefense(GaussianNoise(Budget(1e-10, "std")))
    with pytest.warns(UserWarning, match="its precision can't hold"):
        fit(tmp_path, watched, module=Known(), data=batches(inputs(2), 2))


class Half(Defense):
    """States twice the noise that it adds."""

    name, needs = "half", "gradient"
    budget = Budget(0.05, "std")

    def protect(self, gradient: Tensor, **keywords: Any) -> Any:
        made = NOISE.protect(gradient, **keywords)
        return type(made)(made.gradient, made.clean, made.variance * 4)

    def protect_batch(self, gradient: Tensor, **keywords: Any) -> Any:
        raise NotImplementedError


def test_a_size_that_is_not_the_one_asked_for_is_noticed(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"the noise has (49|50|51)\.\d% of the size"):
        fit(
            tmp_path, GradientDefense(Half()), module=Known(size=1000),
            data=batches(inputs(24, 1000), 2),
        )  # fmt: skip


def test_a_right_size_is_not_warned_about() -> None:
    tally = Tally(ratios=100, ratio=104.0, ratio_squared=110.0)
    assert tally.off is None
    assert Tally(ratios=9, ratio=90.0, ratio_squared=900.0).off is None
    assert Tally(ratios=100, ratio=400.0, ratio_squared=1600.0).off == 2.0


# -- fails closed ----------------------------------------------------------------------


class Broken(Half):
    def protect(self, gradient: Tensor, **keywords: Any) -> Any:
        raise ArithmeticError("no luck")


def test_a_defense_that_fails_stops_training(tmp_path: Path) -> None:
    module = Known()
    with pytest.raises(ArithmeticError, match="no luck"):
        fit(
            tmp_path, GradientDefense(Broken()), module=module,
            data=batches(inputs(4), 2),
        )  # fmt: skip
    assert module.recording.consumed == []
    assert "configure_gradient_clipping" not in vars(module)
    assert len(module.recording._optimizer_step_post_hooks) == 0


class Sneaky(Two):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.first(batch[0]).mean())
        self.recordings[0].step()


def test_a_step_past_the_defense_stops_training(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"was not defended; take steps through"):
        fit(
            tmp_path, GradientDefense(NOISE), module=Sneaky(),
            data=batches(inputs(4), 2),
        )  # fmt: skip


def test_a_gradient_that_is_not_finite_stops_training(tmp_path: Path) -> None:
    x = inputs(4)
    x[2] = float("nan")
    with pytest.raises(RuntimeError, match="gradient of step 1 is not finite"):
        fit(tmp_path, GradientDefense(NOISE), module=Known(), data=batches(x, 2))


class Skipping(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_skipped_batches_are_not_samples_of_a_step(tmp_path: Path) -> None:
    watched = GradientDefense(MixUp(0.7))
    fit(
        tmp_path, watched, module=Skipping(), accumulate_grad_batches=2,
        limit_train_batches=2,
    )  # fmt: skip
    assert watched.summary.steps == 1


# -- refused ---------------------------------------------------------------------------


class Other(Tiny):
    def __init__(self, make: Callable[..., Any], net: nn.Module | None = None) -> None:
        super().__init__(net)
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters(), lr=0.1)


class Sparse(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(3, 2, sparse=True)


class Partly(Tiny):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[1].parameters(), lr=0.1)  # type: ignore[index]


def scaled() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


REFUSED: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "LBFGS": (NOISE, Other(torch.optim.LBFGS), {}, "LBFGS evaluates several"),
    "fused": (
        NOISE,
        Other(lambda p, lr: torch.optim.Adam(p, lr, fused=True)),
        {"plugins": "scaled"},
        r"use Adam\(fused=False\)",
    ),
    "sparse": (NOISE, Sparse(), {}, "words has sparse gradients"),
    "manual": (MixUp(), Two(), {}, "use automatic optimisation"),
    "value": (
        MixUp(),
        Tiny(),
        {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
        "gradient_clip_algorithm='norm'",
    ),
    "twice clipped": (
        DPSGD(1.0, 1.0),
        Tiny(),
        {"gradient_clip_val": 1.0},
        r"remove gradient_clip_val=1\.0",
    ),
    "partly": (MixUp(), Partly(), {}, r"'net\.3\.weight' is trained by no optimiser"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused(case: str, tmp_path: Path) -> None:
    defense, module, changes, match = REFUSED[case]
    if "plugins" in changes:
        changes = {"plugins": scaled()}
    with pytest.raises(RuntimeError, match=match):
        fit(tmp_path, GradientDefense(defense), module=module, **changes)


def test_sharded_and_unknown_strategies_are_refused() -> None:
    module = Tiny()
    device = {"root_device": torch.device("cpu")}
    sharded = type("FSDPStrategy", (), device)()
    trainer: Any = SimpleNamespace(strategy=sharded, world_size=2)
    with pytest.raises(RuntimeError, match="each process holds a part"):
        refuse_run(trainer, module, NOISE)
    trainer.strategy = SimpleNamespace(**device)
    with pytest.raises(RuntimeError, match="train with strategy='ddp'"):
        refuse_run(trainer, module, NOISE)


def test_two_defenses_are_refused(tmp_path: Path) -> None:
    both = GradientDefense(NOISE), GradientDefense(NOISE, name="other")
    with pytest.raises(RuntimeError, match="two GradientDefense callbacks"):
        fit(tmp_path, *both)


def test_batches_must_be_pairs(tmp_path: Path) -> None:
    data = DataLoader([{"x": torch.rand(16)}])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"batches \(x, y\) of two tensors, got a dict"):
        fit(tmp_path, GradientDefense(MixUp()), data=data)


class Summing(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * len(batch[0])


def test_dp_sgd_refuses_a_loss_that_combines_otherwise(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"differs by 75\.0% .* no sample"):
        fit(tmp_path, GradientDefense(DPSGD(1.0, 1.0)), module=Summing())


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
    )


def test_others_warn_of_another_gradient(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"differs by \d+\.\d% from the combined"):
        fit(
            tmp_path, GradientDefense(MixUp()), module=Tiny(normalised()),
            limit_train_batches=1,
        )  # fmt: skip


def test_clipping_by_norm_is_a_factor() -> None:
    g = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert clip_factor(g, g * 0.3) == pytest.approx(0.3, rel=1e-12)
    assert clip_factor(g * 0, g * 0) == 1.0
    with pytest.raises(RuntimeError, match="changed the direction"):
        clip_factor(g, g.clamp(max=3.5))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"defense": GaussianNoise}, TypeError, "for instance GaussianNoise"),
        ({"defense": 0.1}, TypeError, "got 0.1"),
        ({"reduction": "max"}, ValueError, "'mean', 'sum'"),
        ({"dtype": "float16"}, ValueError, "got 'float16'"),
        ({"criterion": 3}, TypeError, "one loss per sample"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"name": "a b"}, ValueError, "part of log keys"),
    ],
)
def test_arguments_are_checked(
    arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        GradientDefense(**({"defense": NOISE} | arguments))


# -- audits ----------------------------------------------------------------------------


def test_an_audit_attacks_what_is_shared_and_changes_nothing(tmp_path: Path) -> None:
    def run(audited: bool) -> tuple[Any, GradientDefense]:
        watched = GradientDefense(GradientPruning(0.5, "layer"))
        audit = InversionAudit(
            2, "lavp-l2", None, steps=1, restarts=1, scores=["lavp_l2_max"],
            solver="lanczos", at_start=True, every_n_epochs=9, report=False,
            verbose=False, perturb=watched.perturb,
        )  # fmt: skip
        more = [audit] if audited else []
        trained = fit(tmp_path, *more, watched, limit_train_batches=1)
        return weights(trained), watched

    assert run(True)[0] == run(False)[0]


def test_perturb_draws_from_a_stream_of_its_own() -> None:
    watched = GradientDefense(NOISE, seed=4)
    noise = watched.perturb(torch.zeros(2, 5000))
    assert float(noise.std()) == pytest.approx(0.05, rel=0.05)
    assert not torch.equal(noise[0], noise[1])
    again = GradientDefense(NOISE, seed=4).perturb(torch.zeros(2, 5000))
    assert torch.equal(noise, again)
    alone = NOISE.protect(
        torch.zeros(2, 5000), generator=torch.Generator().manual_seed(4)
    )
    assert not torch.equal(noise, alone.gradient)


def test_perturb_of_a_defense_of_samples_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"leakwatch\.attack\(\.\.\., perturb="):
        _ = GradientDefense(MixUp()).perturb
