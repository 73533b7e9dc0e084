"""Bases that are kept for some steps: what is drawn with them, and what they cost."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from monitor_cases import Tiny, dataset, fit, flat, loader
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from leakwatch import GradientJacobian
from leakwatch.callbacks import GradientDefense
from leakwatch.callbacks._defense.basis_cache import BasisMemory
from leakwatch.defenses import (
    DPSGD,
    Budget,
    EigenNoise,
    GaussianNoise,
    InputSpace,
    InRange,
    Proportional,
    Samples,
    Single,
    Smallest,
    Waterfill,
)
from leakwatch.defenses.covariance import standard
from leakwatch.defenses.eigen.basis import Directions
from leakwatch.derivatives import GradientMap

MIB = 2**20
SIZE = 16
ONE = Directions.size_of(SIZE) / MIB
NOISE = EigenNoise(Budget(0.1, "relative"), "smallest")
KINDS = {"defense/bases_formed", "defense/bases_reused", "defense/basis_seconds"}


def network() -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(SIZE, 8), nn.Sigmoid(), nn.Linear(8, 3))
    return net.double()


def moved(net: nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))


def private(n: int = 4) -> tuple[Tensor, Tensor]:
    x, y = dataset(n).tensors
    return x.double(), y


def seen(memory: BasisMemory, x: Tensor, y: Tensor) -> tuple[int, int]:
    """How many bases one step forms, and how many it uses again."""
    memory.advance()
    memory.basis(GradientJacobian(GradientMap(network(), dtype=torch.float64), x, y))
    return memory.cost.formed, memory.cost.reused


def weights(run: Any) -> list[list[float]]:
    return flat(list(run.model.parameters()))


def later(
    memory: BasisMemory, rows: slice = slice(None)
) -> tuple[Samples, Samples, nn.Module]:
    """Samples whose bases are formed, and the same under other weights, reordered."""
    net = network()
    at = GradientMap(net, dtype=torch.float64)
    x, y = private()
    memory.advance()
    then = Samples(at, x[rows], y[rows], basis=memory.basis)
    _ = then.basis
    moved(net)
    memory.advance()
    now = Samples(at, x.flip(0), y.flip(0), basis=memory.basis)
    return then, now, net


# -- what is drawn ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "allocation",
    [Smallest(5), Single(0), Proportional(), Waterfill(0.1)],
    ids=lambda a: a.name,
)
def test_noise_in_a_kept_basis_is_that_of_the_present_jacobian(allocation: Any) -> None:
    then, now, _ = later(BasisMemory(2))
    total = torch.full((4,), 0.1**2, dtype=torch.float64)
    made = EigenNoise(Budget(0.1, "norm"), allocation).protect(
        now.gradient, generator=torch.Generator().manual_seed(2), samples=now
    )
    variance = allocation.covariance(then, total).variance.flip(0)
    xi = standard(4, SIZE, torch.Generator().manual_seed(2), "gaussian")
    stretched = []
    for i in range(4):
        c = xi[i] * variance[i].sqrt()
        earlier = then.basis.of_sample(3 - i)
        used = variance[i] > 0
        u = earlier.directions[:, used]
        plain = now.jacobian.dense(i) @ u @ (c[used] / earlier.eigenvalues[used].sqrt())
        stretched.append(float(plain.norm() / c.norm()))
        expected = plain * c.norm() / plain.norm()
        torch.testing.assert_close(made.delta[i], expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(made.variance, variance.sum(1), rtol=1e-12, atol=0.0)
    # Otherwise there would have been nothing to scale.
    assert max(abs(s - 1) for s in stretched) > 0.05


def test_a_batch_has_the_budget_of_its_message_in_the_mean() -> None:
    _, now, _ = later(BasisMemory(2))
    noise = EigenNoise(Budget(0.05, "norm"), "smallest", "sign")
    generator = torch.Generator().manual_seed(2)
    squares = [
        noise.protect_batch(now.gradient, generator=generator, samples=now)
        .delta.square()
        .sum()
        for _ in range(100)
    ]
    assert float(torch.stack(squares).mean().sqrt()) == pytest.approx(0.05, rel=0.05)


def test_a_moved_image_keeps_its_size_to_first_order() -> None:
    then, now, _ = later(BasisMemory(2))
    total = torch.full((4,), 1e-4, dtype=torch.float64)
    noise = InputSpace(0.1).covariance(now, total)
    assert isinstance(noise, InRange)
    a = noise.draw_input(torch.Generator().manual_seed(2))
    xi = standard(4, SIZE, torch.Generator().manual_seed(2), "gaussian")
    c = xi * Waterfill(0.1).covariance(then, total).variance.flip(0).sqrt()
    pushed = torch.stack([now.jacobian.dense(i) @ a[i] for i in range(4)])
    torch.testing.assert_close(pushed.norm(dim=1), c.norm(dim=1), rtol=1e-10, atol=0.0)
    delta = noise.draw(torch.Generator().manual_seed(2))
    at = now.gradients
    expected = at(now.x + a.view(now.x.shape), now.y) - at(now.x, now.y)
    torch.testing.assert_close(delta, expected, rtol=1e-10, atol=1e-12)


def test_a_moved_image_has_its_budget_in_kept_directions() -> None:
    _, now, _ = later(BasisMemory(2))
    noise = EigenNoise(Budget(0.2, "relative"), InputSpace(2.0))
    for seed in range(3):
        made = noise.protect(
            now.gradient, generator=torch.Generator().manual_seed(seed), samples=now
        )
        sizes = made.delta.norm(dim=1) / now.gradient.norm(dim=1)
        torch.testing.assert_close(
            sizes, torch.full((4,), 0.2).double(), rtol=1e-3, atol=0.0
        )


def test_samples_without_a_kept_basis_get_noise_as_ever() -> None:
    _, now, _ = later(BasisMemory(2), slice(2))
    assert now.basis.aged is not None
    assert now.basis.aged.tolist() == [False, False, True, True]
    fresh = Samples(now.gradients, now.x, now.y)
    noise = EigenNoise(Budget(0.1, "norm"))
    mixed, plain = (
        noise.protect(s.gradient, generator=torch.Generator().manual_seed(2), samples=s)
        for s in (now, fresh)
    )
    assert torch.equal(mixed.gradient[:2], plain.gradient[:2])
    assert not torch.allclose(mixed.gradient[2:], plain.gradient[2:], atol=1e-4)


def test_directions_that_lead_nowhere_by_now_are_an_error() -> None:
    _, now, net = later(BasisMemory(2))
    for p in net.parameters():
        nn.init.zeros_(p)
    noise = EigenNoise(Budget(0.1, "norm"), "smallest")
    with pytest.raises(RuntimeError, match=r"sample 0 no longer moves .* smaller ref"):
        noise.protect(now.gradient, generator=torch.Generator(), samples=now)


# -- in training -----------------------------------------------------------------------


def test_a_basis_every_step_is_what_there_was_without_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = GradientDefense(NOISE, refresh_every=1)
    run = fit(tmp_path, watched, limit_train_batches=2)
    found = watched.summary
    assert (found.bases_formed, found.bases_reused) == (8, 0)
    monkeypatch.setattr(
        "leakwatch.callbacks.gradient_defense.memory_for", lambda *_: None
    )
    plain = GradientDefense(NOISE)
    again = fit(tmp_path, plain, limit_train_batches=2)
    assert weights(again) == weights(run)
    assert plain.summary.bases_formed == 0


def test_the_noise_applied_has_the_size_stated(tmp_path: Path) -> None:
    # ±1, and one sample: its ‖δ‖ is then the budget in every step.
    noise = EigenNoise(Budget(0.05, "norm"), Smallest(8), "sign")
    watched = GradientDefense(noise, refresh_every=5)
    same: Any = ConcatDataset([dataset(1)] * 10)
    run = fit(tmp_path, watched, data=DataLoader(same, 1))
    found = watched.summary
    assert (found.steps, found.bases_formed, found.bases_reused) == (10, 2, 8)
    assert 0 < found.basis_seconds < found.seconds
    assert found.asked == pytest.approx(0.05, rel=1e-12)
    assert found.applied == pytest.approx(0.05, rel=1e-5)
    assert set(run.logged_metrics) >= KINDS
    assert float(run.logged_metrics["defense/bases_formed"]) == 0
    assert float(run.logged_metrics["defense/bases_reused"]) == 1


def test_shuffled_samples_are_found_again(tmp_path: Path) -> None:
    watched = GradientDefense(NOISE, refresh_every=100)
    fit(tmp_path, watched, data=loader(6, 2), max_epochs=3)
    assert (watched.summary.bases_formed, watched.summary.bases_reused) == (6, 12)


def test_only_noise_along_directions_logs_what_they_cost(tmp_path: Path) -> None:
    for defense in (EigenNoise(Budget(0.1), "diagonal"), DPSGD(1.0, 1.0)):
        run = fit(tmp_path, GradientDefense(defense), limit_train_batches=1)
        assert not KINDS & set(run.logged_metrics)


def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    # Every batch is the same: Lightning begins an epoch anew where it goes on with one.
    same: Any = ConcatDataset([dataset(2)] * 4)
    data: Any = DataLoader(same, 2)
    whole = GradientDefense(NOISE, refresh_every=3)
    save = ModelCheckpoint(
        tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1
    )
    expected = fit(
        tmp_path, whole, save, data=data, max_epochs=2,
        enable_checkpointing=True,
    )  # fmt: skip

    def resumed(path: Path) -> tuple[Any, dict[str, Any]]:
        again = GradientDefense(NOISE, refresh_every=3)
        run = fit(tmp_path, again, data=data, max_epochs=2, seed=9, ckpt_path=path)
        return weights(run), asdict(again.summary)

    found, summary = resumed(tmp_path / "step=4.ckpt")
    assert found == weights(expected)
    other = asdict(whole.summary)
    for timed in ("seconds", "basis_seconds"):
        assert summary.pop(timed) > 0
        assert other.pop(timed) > 0
    assert summary == other
    assert (summary["bases_formed"], summary["bases_reused"]) == (6, 10)
    # A checkpoint without its bases would not do.
    state = torch.load(tmp_path / "step=4.ckpt", weights_only=False)
    (kept,) = (s for k, s in state["callbacks"].items() if k.startswith("GradientDef"))
    assert len(kept["bases"]["kept"]) == 2
    kept["bases"]["kept"] = []
    torch.save(state, tmp_path / "bare.ckpt")
    assert resumed(tmp_path / "bare.ckpt")[0] != weights(expected)


def test_another_fit_forgets(tmp_path: Path) -> None:
    watched = GradientDefense(NOISE, refresh_every=100)
    for _ in range(2):
        fit(tmp_path, watched, limit_train_batches=2)
        assert watched.summary.bases_formed == 8
    # Nor does one that resumes count what the object did before.
    fresh = GradientDefense(NOISE, refresh_every=100)
    assert fresh.state_dict()["bases"]["kept"] == []


# -- what is kept ----------------------------------------------------------------------


def test_a_basis_serves_so_many_steps() -> None:
    memory, (x, y) = BasisMemory(3), private(2)
    assert [seen(memory, x, y) for _ in range(7)] == [
        (2, 0), (0, 2), (0, 2), (2, 0), (0, 2), (0, 2), (2, 0),
    ]  # fmt: skip
    assert len(memory) == 2


def test_what_is_too_old_is_forgotten_though_it_never_comes_back() -> None:
    memory, (x, y) = BasisMemory(2), private()
    for i in range(4):
        assert seen(memory, x[i : i + 1], y[i : i + 1]) == (1, 0)
    assert len(memory) == 2
    assert memory.size == 2 * Directions.size_of(SIZE)


def test_the_least_recently_used_goes_first() -> None:
    memory, (x, y) = BasisMemory(100, 3.5 * ONE), private()
    formed = []
    for i in (0, 1, 2, 0, 3, 0, 2, 3, 1):
        formed.append(seen(memory, x[i : i + 1], y[i : i + 1])[0])
        assert len(memory) <= 3
        assert memory.size <= 3.5 * ONE * MIB
    # 3 takes the place of 1, the first by last use though not by age, and 1 that of 0.
    assert formed == [1, 1, 1, 0, 1, 0, 0, 0, 1]
    assert seen(memory, x[:1], y[:1]) == (1, 0)


def test_a_batch_larger_than_the_memory_leaves_what_fits() -> None:
    memory, (x, y) = BasisMemory(100, 2.5 * ONE), private()
    assert seen(memory, x, y) == (4, 0)
    assert len(memory) == 2
    assert seen(memory, x, y) == (2, 2)


def test_a_sample_is_its_bytes_and_its_label() -> None:
    memory, (x, y) = BasisMemory(100), private(1)
    assert seen(memory, x, y) == (1, 0)
    assert seen(memory, x.repeat(2, 1, 1, 1), y.repeat(2)) == (0, 2)
    assert seen(memory, x, (y + 1) % 3) == (1, 0)
    assert seen(memory, x.float(), y) == (1, 0)
    assert seen(memory, x.bfloat16(), y) == (1, 0)
    assert seen(memory, x.flip(-1), y) == (1, 0)
    assert seen(memory, x.bfloat16(), y) == (0, 1)


def test_twice_in_one_batch_is_kept_once() -> None:
    memory, (x, y) = BasisMemory(100), private(1)
    assert seen(memory, x.repeat(2, 1, 1, 1), y.repeat(2)) == (2, 0)
    assert (len(memory), memory.size) == (1, Directions.size_of(SIZE))


def test_restored_bases_keep_their_order_and_age() -> None:
    memory, (x, y) = BasisMemory(4, 2.5 * ONE), private()
    seen(memory, x[:1], y[:1])
    seen(memory, x[1:2], y[1:2])
    seen(memory, x[:1], y[:1])
    copy = BasisMemory(4, 2.5 * ONE)
    copy.restore(memory.state(), torch.device("cpu"))
    for one in (memory, copy):
        assert seen(one, x[2:3], y[2:3]) == (1, 0)  # takes the place of 1
        assert seen(one, x[:1], y[:1]) == (1, 0)  # four steps old
        assert seen(one, x[1:2], y[1:2]) == (1, 0)
    assert copy.size == memory.size


# -- refused, and warned about ---------------------------------------------------------


class Augmented(Dataset[Any]):
    """No sample is the same twice."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if i >= len(self):
            raise IndexError(i)
        return torch.rand(1, 4, 4), torch.tensor(i % 3)


def test_augmentation_is_warned_about(tmp_path: Path) -> None:
    watched = GradientDefense(NOISE, refresh_every=100)
    data: Any = DataLoader(Augmented(), 2)
    with pytest.warns(UserWarning, match=r"in two epochs: .*random augm") as seen:
        fit(tmp_path, watched, module=Tiny(), data=data, max_epochs=4)
    assert sum("no basis was used again" in str(w.message) for w in seen) == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"refresh_every": 2}, r"refresh_every=2 is over before an epoch of 2 steps"),
        ({"refresh_every": 100, "basis_memory": 2.5 * ONE}, r"holds 2 bases, fewer"),
    ],
)
def test_bounds_that_are_too_small_are_warned_about(
    arguments: dict[str, Any], match: str, tmp_path: Path
) -> None:
    data: Any = DataLoader(dataset(4), 2)
    with pytest.warns(UserWarning, match=match):
        fit(tmp_path, GradientDefense(NOISE, **arguments), data=data, max_epochs=2)


def test_nobody_is_warned_of_one_epoch_or_one_step(tmp_path: Path) -> None:
    data: Any = DataLoader(Augmented(), 2)
    fit(tmp_path, GradientDefense(NOISE, refresh_every=9), data=data, max_epochs=1)
    fit(tmp_path, GradientDefense(NOISE), data=data, max_epochs=3)


def test_a_memory_without_room_for_one_is_an_error(tmp_path: Path) -> None:
    watched = GradientDefense(NOISE, refresh_every=2, basis_memory=0.9 * ONE)
    with pytest.raises(ValueError, match=r"holds no basis: one of 16 inputs takes"):
        fit(tmp_path, watched)


@pytest.mark.parametrize(
    ("defense", "arguments", "error", "match"),
    [
        (NOISE, {"refresh_every": 0}, ValueError, "refresh_every must be at least 1"),
        (NOISE, {"refresh_every": 2.0}, TypeError, "must be an integer"),
        (NOISE, {"refresh_every": True}, TypeError, "must be an integer"),
        (NOISE, {"basis_memory": 0}, ValueError, "basis_memory must be positive"),
        (GaussianNoise(Budget(0.1)), {"refresh_every": 2}, ValueError, "forms no bas"),
        (
            EigenNoise(Budget(0.1), "diagonal"),
            {"refresh_every": 2},
            ValueError,
            "eigen-diagonal forms no basis",
        ),
        (GaussianNoise(Budget(0.1)), {"refresh_every": 0}, ValueError, "at least 1"),
    ],
)
def test_arguments_are_checked(
    defense: Any, arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        GradientDefense(defense, **arguments)
