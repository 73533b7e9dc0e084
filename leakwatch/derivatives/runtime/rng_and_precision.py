"""Guards for process-wide state: random streams and arithmetic settings.

A measurement that runs beside training must not move a random stream (one extra
draw changes shuffling and with it the final weights) and must not depend on how
training is set up to compute (autocast, TF32, fused attention without a second
derivative). `isolated_rng` takes care of the first, `plain_arithmetic` of the
second. Both restore everything when they end, also when they end in an exception.
"""

from __future__ import annotations

import pickle
import random
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["isolated_rng", "plain_arithmetic", "seed_streams", "state_of_streams"]

_OPERATIONS = (
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)
_PARENTS = (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"))


def seed_streams(seed: int) -> None:
    """Seed every global random stream that is in use.

    Call it inside `isolated_rng`. Unlike `torch.manual_seed` it leaves an
    uninitialised CUDA alone: that function would queue the seed for the moment at
    which CUDA starts, long after the caller has finished.

    Args:
        seed: any integer; NumPy gets it modulo 2**32.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if _cuda_runs():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def state_of_streams() -> bytes:
    """The state of every global random stream that is in use.

    Where it is the same before and after, what ran between drew nothing; where it is
    the same after two runs from one state, they drew the same numbers.

    Example:
        >>> before = state_of_streams()
        >>> _ = torch.rand(3)
        >>> state_of_streams() == before
        False
    """
    streams = [torch.get_rng_state()]
    streams += torch.cuda.get_rng_state_all() if _cuda_runs() else []
    streams += [torch.mps.get_rng_state()] if torch.backends.mps.is_available() else []
    numpy = np.random.get_state(legacy=False)
    plain = [stream.cpu().numpy().tobytes() for stream in streams]
    return pickle.dumps((random.getstate(), numpy, plain))


@contextmanager
def isolated_rng(seed: int | None = None) -> Iterator[None]:
    """Give every global random stream back as it was found.

    Covers Python's `random`, NumPy's legacy global stream, Torch's CPU stream, that
    of every CUDA device once CUDA is initialised, and MPS. CUDA is never
    initialised from here; if the body does it, its streams restart afterwards from
    the seed that they started with.

    Args:
        seed: when given, all streams are seeded with it inside, so that what runs
            there is reproducible.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> first = torch.rand(3)
        >>> _ = torch.manual_seed(0)
        >>> with isolated_rng(seed=7):
        ...     elsewhere = torch.rand(100)
        >>> torch.equal(torch.rand(3), first)
        True
    """
    python = random.getstate()
    numpy = np.random.get_state(legacy=False)
    cpu = torch.get_rng_state()
    cuda_running = _cuda_runs()
    cuda = torch.cuda.get_rng_state_all() if cuda_running else []
    mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    try:
        if seed is not None:
            seed_streams(seed)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda_running:
            torch.cuda.set_rng_state_all(cuda)
        elif _cuda_runs():
            for generator in torch.cuda.default_generators:
                generator.manual_seed(generator.initial_seed())
        if mps is not None:
            torch.mps.set_rng_state(mps)


@contextmanager
def plain_arithmetic(device_type: str = "cpu") -> Iterator[None]:
    """Compute in full precision, differentiably any number of times.

    Inside, whatever the surroundings:

    - inference mode is off and gradients are recorded. A tensor that was *made* in
      inference mode still has to be cloned before it takes part.
    - autocast is off, for the device and for the CPU.
    - float32 products, convolutions and recurrences use float32, not TF32 or
      bfloat16; cuDNN does not benchmark.
    - attention uses the plain ("math") implementation: the fused ones have no
      second derivative and no forward-mode rule.

    Afterwards these settings, the default dtype, the deterministic-algorithms flag
    and cuDNN's flags are as they were, even if the body changed them. One thing
    can't be put back from Python: cuDNN's TF32 default becomes an explicit "tf32"
    of the same effect (on CUDA only).

    Args:
        device_type: as in `torch.device(...).type`, for example "cuda".

    Example:
        >>> with torch.inference_mode(), plain_arithmetic("cpu"):
        ...     x = torch.ones(2, requires_grad=True)
        ...     (x**3).sum().backward()
        >>> x.grad
        tensor([3., 3.])
    """
    with ExitStack() as stack:
        stack.enter_context(_restored_flags())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in dict.fromkeys(("cpu", device_type)):
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(_full_float32(device_type))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        torch.backends.mha.set_fastpath_enabled(False)
        torch.backends.cudnn.benchmark = False
        yield


def _cuda_runs() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@contextmanager
def _restored_flags() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    deterministic = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fastpath = torch.backends.mha.get_fastpath_enabled()
    cudnn = torch.backends.cudnn
    cudnn_flags = (cudnn.enabled, cudnn.benchmark, cudnn.deterministic)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        now = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        if now != deterministic:
            torch.use_deterministic_algorithms(
                deterministic[0], warn_only=deterministic[1]
            )
        torch.backends.mha.set_fastpath_enabled(fastpath)
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = cudnn_flags


def _full_float32(device_type: str) -> AbstractContextManager[None]:
    """Turn TF32 and bfloat16 products off, through whichever API Torch has.

    Torch 2.9 added a table of precisions per backend and operation beside the two
    older switches. The older ones complain when the table disagrees with them, so
    inside both say the same, and the state of each is saved on its own.
    """
    has_table = hasattr(torch._C, "_get_fp32_precision_getter")
    return (_table_guard if has_table else _switch_guard)(device_type)


@contextmanager
def _switch_guard(device_type: str) -> Iterator[None]:
    matmul = torch.get_float32_matmul_precision()
    convolution = torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("highest")
        if device_type == "cuda":
            torch.backends.cudnn.allow_tf32 = False
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolution


@contextmanager
def _table_guard(device_type: str) -> Iterator[None]:
    get = torch._C._get_fp32_precision_getter
    put = torch._C._set_fp32_precision_setter
    with _quiet():
        table = _read_table()
        for backend in ("cuda", "mkldnn"):
            put(backend, "matmul", "ieee")
        matmul = torch.get_float32_matmul_precision()
        _write_parents(table)
        reduced = any(get("cuda", op) == "tf32" for op in ("conv", "rnn"))
        convolution = _cudnn_switch() if device_type == "cuda" and reduced else None
    try:
        with _quiet():
            torch.set_float32_matmul_precision("highest")
            for operation in ("all", "conv", "rnn"):
                put("mkldnn", operation, "ieee")
            if convolution is not None:
                torch.backends.cudnn.allow_tf32 = False
                put("cuda", "all", "ieee")
        yield
    finally:
        with _quiet():
            torch.set_float32_matmul_precision(matmul)
            if convolution is not None:
                torch.backends.cudnn.allow_tf32 = convolution
            now = _read_table()
            for key in _OPERATIONS:
                # cuDNN's untouched default can't be written back, so an equal
                # value is left alone.
                if now[key] != table[key]:
                    put(*key, table[key])
            _write_parents(table)


def _read_table() -> dict[tuple[str, str], str]:
    """Read each precision as it was set; an unset one inherits when it is read.

    Leaves the parents unset: `_write_parents` sets them again.
    """
    table = {}
    for key in (*_PARENTS, *_OPERATIONS):
        table[key] = torch._C._get_fp32_precision_getter(*key)
        if key in _PARENTS:
            torch._C._set_fp32_precision_setter(*key, "none")
    return table


def _write_parents(table: dict[tuple[str, str], str]) -> None:
    for key in _PARENTS:
        torch._C._set_fp32_precision_setter(*key, table[key])


def _cudnn_switch() -> bool:
    """Read cuDNN's older TF32 switch, which refuses while the table contradicts it."""
    for operation in ("conv", "rnn"):
        torch._C._set_fp32_precision_setter("cuda", operation, "tf32")
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return False


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
