from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leakwatch.derivatives.runtime.chunking import in_chunks, out_of_memory

ERRORS = [
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"
    ),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("fits", [1, 2, 3])
def test_halves_when_memory_runs_out(error: RuntimeError, fits: int) -> None:
    sizes: list[int] = []

    def f(a: Tensor, b: Tensor) -> Tensor:
        sizes.append(len(a))
        if len(a) > fits:
            raise error
        return a * b

    a, b = torch.arange(11.0), torch.rand(11)
    torch.testing.assert_close(in_chunks(f, (a, b), 8), a * b)
    assert sizes[0] == 8
    assert max(sizes[sizes.index(min(sizes)) :]) <= fits
    assert out_of_memory(error)


def test_gives_up_at_one_row_and_on_other_errors() -> None:
    def full(a: Tensor) -> Tensor:
        raise ERRORS[0]

    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"20\.00 GiB"):
        in_chunks(full, (torch.ones(4),), 4)
    calls = 0

    def broken(a: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        in_chunks(broken, (torch.ones(4),), 4)
    assert calls == 1
