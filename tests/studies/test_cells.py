"""Cells of studies: wherever they run, however often they are interrupted."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from torch import nn

from leakwatch.defenses import Defense
from leakwatch.studies import Applied, TradeOff, compare_initializations, trade_off
from leakwatch.studies.cells import CellStore, UnreadableError, Work, digest, run_cells
from leakwatch.studies.trade_offs.rows import decoded, encoded
from studies.problems import network, samples


class Colour(Enum):
    RED = 1
    BLUE = 2


def descend(net: nn.Module, defense: Defense | None, seed: int) -> Applied | None:
    """One step with a random direction, which the global stream draws."""
    with torch.no_grad():
        for p in net.parameters():
            p += 0.01 * torch.randn_like(p)
    return None if defense is None else Applied(1, 0.5, float("nan"), 0.25)


def half(net: nn.Module) -> float:
    return 0.5


def traded(**options: Any) -> TradeOff:
    x, y = samples(1)
    how = {"budgets": [0.1], "attackers": ["naive"], "steps": 2, "seeds": 2} | options
    # Flat samples are no images, of which LPIPS would be computed too.
    return trade_off(
        network(), x.flatten(1), y, descend, half, defenses=["gaussian"], **how
    )


def text(found: TradeOff) -> str:
    """All that was found, to the bit."""
    return json.dumps([encoded(cell) for cell in found.cells])


def compared(**options: Any) -> str:
    x, y = samples(1)
    how = {"attacks": ["dgl"], "steps": 2, "repeats": 1, "seeds": 2} | options
    found = compare_initializations(network(), x, y, ["normal", "xavier"], **how)
    return json.dumps([vars(point) for point in found.points])


@pytest.fixture(scope="module")
def alone() -> tuple[str, str]:
    return text(traded()), compared()


def test_two_processes_find_what_one_does(alone: tuple[str, str]) -> None:
    with joblib.parallel_config("multiprocessing", n_jobs=2):
        assert (text(traded()), compared()) == alone


@pytest.mark.long
@pytest.mark.parametrize("threads", [1, 2])
def test_fresh_processes_find_what_one_does(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = text(traded()), compared()
        assert (text(traded(n_jobs=2)), compared(n_jobs=2)) == alone
    finally:
        torch.set_num_threads(before)
        from joblib.externals.loky import get_reusable_executor

        get_reusable_executor().shutdown()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_cluster_finds_what_one_process_does(alone: tuple[str, str]) -> None:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster),
        joblib.parallel_config("dask"),
    ):
        assert (text(traded()), compared()) == alone


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of Ray and what it imports
def test_ray_finds_what_one_process_does(
    alone: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    joined = pytest.importorskip("ray.util.joblib")
    tests = str(Path(__file__).parents[1])
    paths = filter(None, [tests, os.environ.get("PYTHONPATH"), os.getcwd()])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        joined.register_ray()
        with joblib.parallel_config("ray"):
            assert (text(traded()), compared()) == alone
    finally:
        ray.shutdown()


class InterruptedRun(BaseException):
    """As Ctrl-C, which no handler of errors takes for one."""


def interrupting(after: int) -> Callable[[str], None]:
    left = [after]

    def progress(line: str) -> None:
        left[0] -= 1
        if not left[0]:
            raise InterruptedRun

    return progress


def test_an_interrupted_study_goes_on(alone: tuple[str, str], tmp_path: Path) -> None:
    for study, expected in (
        (lambda **options: text(traded(**options)), alone[0]),
        (compared, alone[1]),
    ):
        folder = tmp_path / str(len(expected))
        with pytest.raises(InterruptedRun):
            study(keep_cells=folder, progress=interrupting(2))
        kept = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
        assert len(kept) == 2
        lines: list[str] = []
        assert study(keep_cells=folder, progress=lines.append) == expected
        assert {path: path.stat().st_mtime_ns for path in kept} == kept
        assert len(list(folder.iterdir())) == len(lines) > 2


_KILLED = """
import sys
sys.path[:0] = {paths!r}
from studies.test_cells import *

def progress(line):
    print(line, flush=True)
    if {kill} and len(list(Path({folder!r}).iterdir())) == 3:
        os.kill(os.getpid(), signal.SIGKILL)

found = traded(keep_cells={folder!r}, progress=progress)
Path({result!r}).write_text(text(found))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="no signals there")
def test_a_killed_study_goes_on(alone: tuple[str, str], tmp_path: Path) -> None:
    folder, result = tmp_path / "cells", tmp_path / "result"
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    for kill, status in ((True, -signal.SIGKILL), (False, 0)):
        script = _KILLED.format(
            paths=paths, kill=kill, folder=str(folder), result=str(result)
        )
        ended = subprocess.run([sys.executable, "-c", script], env=os.environ)
        assert ended.returncode == status
        assert len(list(folder.iterdir())) == (3 if kill else 4)
    assert result.read_text() == alone[0]


def test_what_changed_is_computed_again(tmp_path: Path) -> None:
    traded(keep_cells=tmp_path, seeds=1)
    assert len(list(tmp_path.iterdir())) == 2
    traded(keep_cells=tmp_path, seeds=2)  # two more
    assert len(list(tmp_path.iterdir())) == 4
    traded(keep_cells=tmp_path, seeds=1, steps=3)  # two others
    assert len(list(tmp_path.iterdir())) == 6


def double(x: int) -> int:
    if x < 0:
        raise ValueError(f"{x} is negative")
    return 2 * x


def work(x: int) -> Work[int]:
    return Work(f"number {x}", double, (x,), x)


def store(folder: Path, **options: Any) -> CellStore[int]:
    how: dict[str, Any] = {"of": "numbers", "encode": int, "decode": int} | options
    return CellStore(folder, **how)


def test_results_come_in_the_order_of_the_cells(tmp_path: Path) -> None:
    told: list[int] = []
    kept = store(tmp_path)
    kept.keep(work(2), 4)
    cells = [work(x) for x in (1, 2, 3)]
    done = lambda _, result: told.append(result)  # noqa: E731
    assert run_cells(cells, store=kept, done=done) == [2, 4, 6]
    assert told == [4, 2, 6]  # first what is there


def test_a_damaged_cell_is_computed_again(tmp_path: Path) -> None:
    kept = store(tmp_path)
    run_cells([work(5)], store=kept)
    [path] = tmp_path.iterdir()
    for damage in (b"", b"{", b'{"result": "?"}', b"[]"):
        path.write_bytes(damage)
        assert run_cells([work(5)], store=kept) == [10]
        assert json.loads(path.read_bytes())["result"] == 10


def test_a_result_without_worth_is_tried_again(tmp_path: Path) -> None:
    run_cells([work(5)], store=store(tmp_path, worth=lambda result: result != 10))
    assert not list(tmp_path.iterdir())


def test_cells_before_an_error_are_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="-1 is negative"):
        run_cells([work(1), work(-1), work(2)], store=store(tmp_path))
    assert [path.name.rpartition("-")[0] for path in tmp_path.iterdir()] == ["number-1"]


def test_a_cell_runs_with_the_threads_of_the_caller() -> None:
    before = torch.get_num_threads()
    counted = Work("threads", torch.get_num_threads, (), ())
    with joblib.parallel_config("multiprocessing", n_jobs=2):
        assert run_cells([counted, counted]) == [before, before]
    assert torch.get_num_threads() == before


def test_cells_come_back_bit_for_bit() -> None:
    for cell in traded(seeds=1).cells:  # of NaN too, which is equal to nothing
        again = decoded(json.loads(json.dumps(encoded(cell))))
        assert json.dumps(encoded(again)) == json.dumps(encoded(cell))
        assert type(again.attacked[0]) is type(cell.attacked[0])
        outcome = again.attacked[0].outcomes["naive"]
        assert outcome.status.usable == cell.attacked[0].outcomes["naive"].status.usable


def test_a_digest_sees_what_changes_results() -> None:
    net = network()
    other = copy.deepcopy(net)
    assert digest(net) == digest(other)
    next(other.parameters()).data[0, 0] += 1e-7
    assert digest(net) != digest(other)
    frozen = copy.deepcopy(net)
    next(frozen.parameters()).requires_grad_(False)
    assert digest(net) != digest(frozen)

    def adding(n: int) -> Callable[[int], int]:
        return lambda x: x + n

    assert digest(adding(1)) == digest(adding(1)) != digest(adding(2))
    assert digest(partial(double, 1)) != digest(partial(double, 2))
    assert digest(double) != digest(half)
    assert digest({"a": 1}) != digest({"a": 1.0})
    assert digest([1, [2]]) != digest([[1], 2])
    assert digest({1, 2, 3}) == digest({3, 2, 1})


def test_a_digest_sees_settings_that_no_weight_shows() -> None:
    class Minus(nn.Module):
        def __init__(self, mean: float) -> None:
            super().__init__()
            self.mean = mean

    assert digest(Minus(0.1)) == digest(Minus(0.1)) != digest(Minus(0.2))
    assert digest(nn.LeakyReLU(0.1)) != digest(nn.LeakyReLU(0.2))
    assert digest(nn.Sequential(nn.AvgPool2d(2))) != digest(
        nn.Sequential(nn.AvgPool2d(2, stride=1))
    )
    net = network()
    assert digest(net.train()) == digest(net.eval())
    assert digest(torch.tanh) != digest(torch.sigmoid)
    assert digest(Colour.RED) == digest(Colour.RED) != digest(Colour.BLUE)
    assert digest(range(2)) != digest(range(3))


class Hidden(nn.Module):
    """A mean in a private attribute."""

    def __init__(self, mean: float) -> None:
        super().__init__()
        self._mean = mean


class Unsaved(nn.Module):
    """A mean that no checkpoint has."""

    def __init__(self, mean: float) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean), persistent=False)


class Loss:
    """With settings in an object of their own."""

    def __init__(self, **settings: Any) -> None:
        self.settings = SimpleNamespace(**settings)


SHIFT = 0.1


def shifted(x: float) -> float:
    return x + SHIFT


@pytest.mark.parametrize(
    "make",
    [
        Hidden,
        Unsaved,
        lambda mean: Loss(mean=mean),
        lambda mean: Loss(means=[torch.tensor(mean)]),
        lambda mean: SimpleNamespace(inner=SimpleNamespace(_mean=mean)),
        lambda mean: torch.complex(torch.ones(1), torch.tensor([mean])).conj(),
    ],
)
def test_a_digest_sees_values_wherever_they_are(make: Callable[[float], Any]) -> None:
    assert digest(make(0.1)) == digest(make(0.1)) != digest(make(0.2))


def test_a_digest_sees_globals_that_are_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = digest(shifted)
    monkeypatch.setitem(globals(), "SHIFT", 0.2)
    assert digest(shifted) != before
    monkeypatch.setitem(globals(), "SHIFT", 0.1)
    assert digest(shifted) == before


class Slotted:
    """With attributes that no ``__dict__`` has, of a base class too."""

    __slots__ = ("mean",)

    def __init__(self, mean: float) -> None:
        self.mean = mean


class MoreSlotted(Slotted):
    __slots__ = ("__own", "other")

    def __init__(self, mean: float) -> None:
        super().__init__(0.5)
        self.__own = mean


def hooked(register: str, hook: Any, **how: Any) -> nn.Module:
    net = network()
    getattr(net[1], register)(hook, **how)
    return net


def shifting(mean: float) -> Callable[..., Any]:
    return lambda module, args, *out: (args[0] + mean,)


class Shift(nn.Module):
    """Its own method is a hook of its own part."""

    def __init__(self, mean: float) -> None:
        super().__init__()
        self.part = nn.Linear(2, 2)
        nn.init.ones_(self.part.weight)
        nn.init.ones_(self.part.bias)
        self.mean = mean
        self.part.register_forward_hook(self.shift)
        self.register_forward_pre_hook(Slotted(mean).__init__)

    def shift(self, module: nn.Module, args: Any, out: Any) -> Any:
        return out + self.mean


def drawn(seed: float) -> random.Random:
    return random.Random(round(10 * seed))


@pytest.mark.parametrize(
    "make",
    [
        Slotted,
        MoreSlotted,
        lambda mean: Loss(inner=Slotted(mean), mean=mean),
        lambda mean: hooked("register_forward_pre_hook", shifting(mean)),
        lambda mean: hooked("register_forward_hook", shifting(mean)),
        lambda mean: hooked("register_full_backward_hook", shifting(mean)),
        lambda mean: hooked("register_full_backward_pre_hook", shifting(mean)),
        Shift,
        drawn,
        lambda seed: deque([drawn(seed)]),
        lambda seed: torch.Generator().manual_seed(round(10 * seed)),
        lambda seed: np.random.default_rng(round(10 * seed)),
        lambda mean: re.compile(str(mean)),
    ],
)
def test_a_digest_sees_states_that_no_dict_has(make: Callable[[float], Any]) -> None:
    assert digest(make(0.1)) == digest(make(0.1)) != digest(make(0.2))


def test_a_digest_sees_hooks() -> None:
    add = shifting(0.1)
    once = digest(hooked("register_forward_pre_hook", add))
    assert digest(network()) != once
    assert once != digest(hooked("register_forward_hook", add))
    with_keywords = hooked("register_forward_pre_hook", add, with_kwargs=True)
    assert once != digest(with_keywords)
    net = network()
    net[1].register_forward_pre_hook(add).remove()
    assert digest(net) == digest(network())


def test_a_digest_sees_the_code_of_classes() -> None:
    def made(source: str) -> Any:
        here: dict[str, Any] = {"nn": nn, "__name__": "own"}
        exec(source, here)
        return here["Own"]()

    def module(body: str) -> Any:
        return made(f"class Own(nn.Module):\n  {body}")

    def plain(body: str) -> Any:
        return made(f"class Base:\n  {body}\nclass Own(Base): pass")

    for of in (module, plain):
        one = digest(of("def forward(self, x): return x"))
        assert one == digest(of("def forward(self, x): return x"))
        assert one != digest(of("def forward(self, x): return x + 1"))
        assert digest(of("slope = 1.0")) != digest(of("slope = 2.0"))
        for kind in ("property", "staticmethod"):
            first, second = (
                digest(of(f"slope = {kind}(lambda self: {n})")) for n in (1, 2)
            )
            assert first != second


def reading(file: Any, *_: Any) -> None:
    next(file)


@pytest.fixture
def unreadable(tmp_path: Path) -> Iterator[list[Any]]:
    path = tmp_path / "stream"
    path.write_text("1 2 3")
    with path.open() as file:
        yield [
            (i for i in range(3)),
            map(abs, [1]),
            file,
            threading.Lock(),
            partial(reading, file),
            Loss(stream=iter([1])),
            hooked("register_forward_hook", partial(reading, iter([1]))),
        ]


def test_what_can_not_be_read_has_no_digest(unreadable: list[Any]) -> None:
    for value in unreadable:
        with pytest.raises(UnreadableError, match="can't be read without using it"):
            digest(["a study", value])


def test_a_study_of_what_can_not_be_read_is_computed_and_not_kept(
    unreadable: list[Any], tmp_path: Path
) -> None:
    for value in unreadable:
        kept = tmp_path / "kept"
        with pytest.warns(UserWarning, match="no cell is kept: .* leave keep_cells"):
            assert run_cells([work(5)], store=store(kept, of=value)) == [10]
        assert not kept.exists()


def test_a_digest_does_not_see_what_a_trainer_goes_through() -> None:
    data = SimpleNamespace(size=8, trainer=SimpleNamespace(loop=Loss(seen=0)))
    before = digest(data)
    data.trainer.loop = Loss(seen=1)
    assert digest(data) == before


@pytest.mark.long
def test_a_digest_is_the_same_in_another_process() -> None:
    script = (
        "from leakwatch.studies.cells import digest;"
        "print(digest([{'a', 'b', 'c'}, digest, {'x': 1.5}]))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert found.stdout.strip() == digest([{"a", "b", "c"}, digest, {"x": 1.5}])
