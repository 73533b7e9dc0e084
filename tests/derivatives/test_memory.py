from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CASES, relative
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leakwatch import GradientJacobian
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.gram import assembly
from leakwatch.derivatives.gram.conv_factors import Workspace
from leakwatch.derivatives.gram.gram import columns_stored, gram
from leakwatch.scores import score

BY_NAME = {case.name: case for case in CASES}


def sample(
    name: str, dtype: torch.dtype = torch.float64
) -> tuple[GradientMap, Tensor, Tensor]:
    case = BY_NAME[name]
    x, y = case.data(1, dtype)
    at = GradientMap(case.module(), dtype=dtype)
    if case.path == "vmap":  # examining it takes longer than all that is tested here
        at._resolved = "vmap"
    return at, x[0], y[0]


@pytest.mark.parametrize("name", ["lenet", "mlp-relu", "transformer", "lstm"])
@pytest.mark.parametrize("part", [0.6, 0.1])
def test_results_do_not_depend_on_the_budget(name: str, part: float) -> None:
    at, x, y = sample(name)
    whole = gram(at, x, y, by_layer=True)
    kept = columns_stored(at, x, y) * x.numel() * 8
    found = gram(at, x, y, max_memory=part * kept / 2**20, by_layer=True)
    assert relative(found.h, whole.h) < 1e-13
    assert relative(found.along, whole.along) < 1e-13
    assert found.norm == pytest.approx(whole.norm, rel=1e-13)
    assert found.traces == pytest.approx(whole.traces, rel=1e-12)
    assert found.largest == pytest.approx(whole.largest, rel=1e-9)


class Machine:
    """Lends so many bytes to a workspace and refuses more, as an allocator does."""

    def __init__(self, limit: int, error: Exception) -> None:
        self.limit, self.error, self.refused, self.most = limit, error, 0, 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = Workspace.empty

        def empty(
            space: Workspace, name: str, rows: int, columns: int, *more: Any
        ) -> Tensor:
            out = plain(space, name, rows, columns, *more)
            sums = ("upper", "half", "one upper", "one half")
            held = {k: t for k, t in space._held.items() if k not in sums}
            used = sum(t.numel() * t.itemsize for t in held.values())
            if used > self.limit:
                self.refused += 1
                raise self.error
            self.most = max(self.most, used)
            return out

        monkeypatch.setattr(Workspace, "empty", empty)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("mlp-relu", torch.OutOfMemoryError("CUDA out of memory.")),
        ("mlp-relu", RuntimeError("DefaultCPUAllocator: can't allocate memory")),
        ("transformer", RuntimeError("not enough memory: you tried to allocate 8")),
        ("lstm", MemoryError()),
    ],
    ids=["cuda", "posix", "windows", "python"],
)
def test_memory_that_runs_out_is_asked_for_in_halves(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, x, y = sample(name)
    whole = gram(at, x, y)
    stored = columns_stored(at, x, y) * x.numel() * 8
    # Two thirds of half the memory are for tangents being formed: a sixth is too much.
    machine = Machine(stored // 8, error)
    machine.install(monkeypatch)
    found = gram(at, x, y)
    assert relative(found.h, whole.h) < 1e-13
    assert machine.refused == 2
    assert stored // 15 < machine.most <= stored // 12


def test_memory_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    at, x, y = sample("mlp-relu")
    Machine(0, MemoryError("gone")).install(monkeypatch)
    with pytest.raises(MemoryError, match="gone"):
        gram(at, x, y)


def test_other_errors_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    at, x, y = sample("mlp-relu")
    machine = Machine(0, RuntimeError("something else"))
    machine.install(monkeypatch)
    with pytest.raises(RuntimeError, match="something else"):
        gram(at, x, y)
    assert machine.refused == 1


@pytest.mark.parametrize("name", ["lenet", "mlp", "mlp-relu", "transformer", "lstm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_estimate_is_what_is_kept(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, x, y = sample(name, dtype)
    estimate = columns_stored(at, x, y) * x.numel() * dtype.itemsize
    monkeypatch.setattr(assembly, "_WIDE_BYTES", 0)
    machine = Machine(2**40, MemoryError())
    machine.install(monkeypatch)
    gram(at, x, y)
    # Besides what is kept for every direction, products of convolutions need some.
    assert 0.9 * estimate <= machine.most <= (1 if name != "lenet" else 6) * estimate


def test_forced_exact_scores_keep_to_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = BY_NAME["mlp"]
    x, y = case.data(2, torch.float32)
    free = score(case.module(), x, y, "lavp", solver="exact")
    machine = Machine(2**14, MemoryError())
    machine.install(monkeypatch)
    tight = score(case.module(), x, y, "lavp", solver="exact", max_memory=2**14 / 2**20)
    assert not machine.refused
    for name in free:
        torch.testing.assert_close(tight[name], free[name], rtol=1e-5, atol=0)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes of the largest tensor that was made, apart from the data."""

    def __init__(self, data: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.data = data.untyped_storage()._cdata
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata != self.data:
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Sigmoid])
def test_samples_of_a_large_data_set_take_no_more_than_themselves(
    activation: type[nn.Module],
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(1, 2, 3), activation(), nn.Flatten(), nn.Linear(72, 3))
    )
    data, y = torch.rand(5000, 1, 8, 8), torch.tensor([0, 1, 2])
    at, v = GradientMap(net), torch.rand(3, 64)
    at(data[:2], y[:2])  # examines the network
    largest = []
    for x in (data[:3].clone(), data[:3]):
        with Largest(data) as seen:
            jacobian = GradientJacobian(at, x, y)
            jacobian.gram(0)
            jacobian.grams([1, 2], torch.eye(64).expand(2, -1, -1))
            jacobian.matvec(v)
            jacobian.dense(1)
        largest.append(seen.bytes)
    assert largest[1] == largest[0]
