from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from leakwatch.derivatives.runtime import rng_and_precision
from leakwatch.derivatives.runtime.rng_and_precision import (
    isolated_rng,
    plain_arithmetic,
)

HAS_TABLE = hasattr(torch._C, "_get_fp32_precision_getter")
KEYS = [
    *product(("generic", "cuda", "mkldnn"), ("all",)),
    *product(("cuda", "mkldnn"), ("matmul", "conv", "rnn")),
]


def draw() -> tuple[float, float, float, list[float], float]:
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        torch.rand(3).tolist(),
        float(np.random.randn()),
    )


@pytest.mark.parametrize("seed", [None, 0, 5, 2**40])
def test_streams_continue_as_if_nothing_had_been_drawn(seed: int | None) -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    draw()
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(python), np.random.set_state(numpy), torch.set_rng_state(cpu)
    with isolated_rng(seed):
        for _ in range(5):
            draw()
        torch.manual_seed(99)
    assert draw() == expected


def test_streams_are_restored_after_an_exception() -> None:
    torch.manual_seed(2)
    before = torch.get_rng_state()
    try:
        with isolated_rng():
            torch.rand(7)
            raise KeyError
    except KeyError:
        pass
    assert torch.equal(torch.get_rng_state(), before)


def test_seed_decides_what_is_drawn_inside() -> None:
    drawn = []
    for outside, seed in [(0, 3), (1, 3), (1, 4)]:
        random.seed(outside), np.random.seed(outside), torch.manual_seed(outside)
        with isolated_rng(seed):
            drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert all(a != b for a, b in zip(drawn[1], drawn[2], strict=True))


def test_without_a_seed_the_streams_go_on_inside() -> None:
    torch.manual_seed(3)
    with isolated_rng():
        inside = torch.rand(4)
    assert torch.equal(torch.rand(4), inside)


def test_cuda_is_neither_started_nor_queued_for_seeding() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("CUDA runs already in this process")
    queued = len(torch.cuda._queued_calls)
    with isolated_rng(seed=1):
        pass
    assert not torch.cuda.is_initialized()
    assert len(torch.cuda._queued_calls) == queued


def test_a_cuda_that_starts_inside_restarts_its_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = torch.Generator().manual_seed(17)
    first = stream.get_state()
    running = [False]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: running[0])
    monkeypatch.setattr(torch.cuda, "default_generators", (stream,))
    with isolated_rng(seed=1):
        running[0] = True
        torch.rand(3, generator=stream)
    assert torch.equal(stream.get_state(), first)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_streams_are_restored() -> None:
    torch.rand(1, device="cuda")
    before = torch.cuda.get_rng_state_all()
    with isolated_rng(seed=1):
        torch.rand(3, device="cuda")
    for a, b in zip(torch.cuda.get_rng_state_all(), before, strict=True):
        assert torch.equal(a, b)


def table() -> list[str]:
    if not HAS_TABLE:
        return []
    return [torch._C._get_fp32_precision_getter(*key) for key in KEYS]


def flags() -> dict[str, object]:
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "attention": (
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        "table": table(),
    }


@pytest.fixture
def precision() -> Iterator[None]:
    """Leave the precision settings of the process as the test found them."""
    yield
    if HAS_TABLE:
        for key in KEYS:
            torch._C._set_fp32_precision_setter(*key, "none")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


def test_surroundings_do_not_reach_inside() -> None:
    x = torch.ones(2, 2)
    with (
        torch.inference_mode(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        plain_arithmetic("cpu"),
    ):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert (x @ x).dtype == torch.float32
        assert not torch.backends.mha.get_fastpath_enabled()
        made = x * 2
    assert not made.is_inference()


def test_attention_is_twice_differentiable_inside() -> None:
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    with plain_arithmetic("cpu"):
        out = F.scaled_dot_product_attention(q, q, q).sum()
        (first,) = torch.autograd.grad(out, q, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), q)
    assert second.isfinite().all()
    assert second.abs().max() > 0


def vandalise() -> None:
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.enabled = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = True
    torch.backends.mha.set_fastpath_enabled(True)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.set_float32_matmul_precision("medium")


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("device_type", ["cpu", "cuda", "mps", "meta"])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_flags_are_restored(
    device_type: str, fails: bool, mode: Callable[[], torch.no_grad]
) -> None:
    with mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        before = flags()
        try:
            with plain_arithmetic(device_type):
                vandalise()
                if fails:
                    raise KeyError
        except KeyError:
            assert fails
        assert flags() == before


def set_new(*settings: tuple[str, str, str]) -> Callable[[], None]:
    def apply() -> None:
        for backend, op, value in settings:
            torch._C._set_fp32_precision_setter(backend, op, value)

    return apply


def old_high() -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = False


def mixed() -> None:
    torch.set_float32_matmul_precision("medium")
    set_new(("cuda", "matmul", "ieee"), ("cuda", "rnn", "none"))()


PRECISIONS = {
    "untouched": lambda: None,
    "old API": old_high,
    "mixed": mixed,
    "matmul": set_new(("cuda", "matmul", "tf32")),
    "everything": set_new(("generic", "all", "tf32")),
    "cuda": set_new(("cuda", "all", "tf32"), ("cuda", "conv", "ieee")),
    "cpu": set_new(("mkldnn", "all", "bf16"), ("mkldnn", "conv", "tf32")),
}


def old_api() -> list[object]:
    """What the older switches answer, refusals included."""
    answers: list[object] = []
    for read in (
        torch.get_float32_matmul_precision,
        lambda: torch.backends.cuda.matmul.allow_tf32,
        lambda: torch.backends.cudnn.allow_tf32,
    ):
        try:
            answers.append(read())
        except RuntimeError:
            answers.append("refused")
    return answers


def inheritance() -> list[list[str]]:
    """The table, and how it answers when a parent entry changes."""
    get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    generic = get("generic", "all")
    put("generic", "all", "none")
    answers = [table()]
    for backend in ("cuda", "mkldnn"):
        parent = get(backend, "all")
        for value in ("ieee", "tf32"):
            put(backend, "all", value)
            answers.append(table())
        put(backend, "all", parent)
    put("generic", "all", generic)
    return answers


@pytest.mark.skipif(not HAS_TABLE, reason="needs the precision table of Torch 2.9")
@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("case", PRECISIONS)
def test_float32_is_float32_inside_and_as_before_outside(
    case: str, device_type: str
) -> None:
    PRECISIONS[case]()
    before, before_deep = (table(), old_api()), inheritance()
    with plain_arithmetic(device_type):
        inside = dict(zip(KEYS, table(), strict=True))
        backend = "cuda" if device_type == "cuda" else "mkldnn"
        for op in ("matmul", "conv", "rnn"):
            assert inside[backend, op] in ("ieee", "none")
        assert old_api()[:2] == ["highest", False]
        if device_type == "cuda":
            # Models that force a plain recurrence use this; it reads the old switch.
            with torch.backends.cudnn.flags(enabled=False):
                pass
    assert (table(), old_api()) == before
    if device_type == "cpu":  # on CUDA an untouched default becomes explicit
        assert inheritance() == before_deep


@pytest.mark.skipif(not HAS_TABLE, reason="needs the precision table of Torch 2.9")
@pytest.mark.usefixtures("precision")
def test_a_computation_on_the_cpu_does_not_write_cudnn_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = []
    put = torch._C._set_fp32_precision_setter

    def record(backend: str, op: str, value: str) -> str:
        written.append((backend, op))
        return put(backend, op, value)

    monkeypatch.setattr(torch._C, "_set_fp32_precision_setter", record)
    with plain_arithmetic("cpu"):
        pass
    assert ("mkldnn", "conv") in written
    assert not {("cuda", "conv"), ("cuda", "rnn")} & set(written)


@pytest.mark.skipif(not HAS_TABLE, reason="needs the precision table of Torch 2.9")
@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("switch", [False, True])
def test_a_switch_that_the_table_contradicts_keeps_its_value(switch: bool) -> None:
    torch.backends.cudnn.allow_tf32 = switch
    set_new(("cuda", "conv", "none"), ("cuda", "rnn", "tf32"))()
    with plain_arithmetic("cuda"):
        assert torch.backends.cudnn.allow_tf32 is False
    value = "tf32" if switch else "none"
    set_new(("cuda", "conv", value), ("cuda", "rnn", value))()
    assert torch.backends.cudnn.allow_tf32 is switch


def test_cudnn_does_not_benchmark_inside() -> None:
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        with plain_arithmetic("cuda"):
            assert not torch.backends.cudnn.benchmark
        assert torch.backends.cudnn.benchmark


@pytest.mark.usefixtures("precision")
def test_versions_without_the_precision_table() -> None:
    old_high()
    with rng_and_precision._switch_guard("cuda"):
        assert torch.get_float32_matmul_precision() == "highest"
        torch.backends.cudnn.allow_tf32 = True
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cudnn.allow_tf32 is False
