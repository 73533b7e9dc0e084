from __future__ import annotations

import math

import pytest
import torch

from leakwatch.spectrum import DenseOperator, SymmetricOperator, as_operator
from leakwatch.spectrum.operators import norm, own_generator, product

from .cases import Recording, rotated


def test_single_matrix_is_a_batch_of_one():
    operator = as_operator(torch.eye(3))
    assert (operator.batch_size, operator.size) == (1, 3)
    assert operator.dtype == torch.float32
    assert operator.device == torch.device("cpu")


def test_operator_is_passed_through():
    operator = Recording(torch.eye(3)[None])
    assert isinstance(operator, SymmetricOperator)
    assert as_operator(operator) is operator


def test_dense_matvec_multiplies_each_sample_and_skips_inactive_ones():
    matrices = torch.stack([torch.eye(2), torch.tensor([[2.0, 1.0], [1.0, 0.0]])])
    v = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    operator = DenseOperator(matrices)
    torch.testing.assert_close(
        operator.matvec(v), torch.tensor([[1.0, 2.0], [10.0, 3.0]])
    )
    torch.testing.assert_close(
        operator.matvec(v, torch.tensor([False, True])),
        torch.tensor([[0.0, 0.0], [10.0, 3.0]]),
    )


def test_dense_operator_is_detached():
    matrices = torch.eye(2, requires_grad=True)
    out = as_operator(matrices).matvec(torch.ones(1, 2))
    assert not out.requires_grad


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.ones(3), "square"),
        (torch.ones(2, 3), "square"),
        (torch.ones(1, 1, 2, 2), "square"),
        (torch.zeros(0, 2, 2), "none empty"),
        (torch.zeros(2, 0, 0), "none empty"),
        (torch.ones(2, 2, dtype=torch.int64), "float32 or torch.float64"),
        (torch.ones(2, 2, dtype=torch.float16), "float32 or torch.float64"),
        (torch.tensor([[1.0, 2.0], [0.0, 1.0]]), "not symmetric"),
        (torch.tensor([[1.0, math.nan], [math.nan, 1.0]]), r"samples \[0\].*NaN"),
        (torch.tensor([[1.0, 0.0], [0.0, math.inf]]), r"samples \[0\].*infinity"),
    ],
)
def test_bad_tensor_is_named(bad, message):
    with pytest.raises(ValueError, match=message):
        as_operator(bad)


def test_error_names_the_asymmetric_sample():
    matrices = torch.eye(2).repeat(3, 1, 1)
    matrices[2, 0, 1] = 0.5
    with pytest.raises(ValueError, match="sample 2 is not symmetric"):
        as_operator(matrices)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e20])
def test_rounding_is_not_asymmetry_at_any_scale(scale):
    matrix = scale * rotated(torch.linspace(1, 2, 20)).float()
    matrix[0, 1] *= 1 + 1e-6
    assert as_operator(matrix).size == 20


def test_anything_else_is_a_type_error():
    with pytest.raises(TypeError, match="got list"):
        as_operator([[1.0]])  # type: ignore[arg-type]


def test_empty_operator_is_refused():
    with pytest.raises(ValueError, match="batch_size 0"):
        as_operator(Recording(torch.zeros(0, 2, 2)))


def test_product_is_float64_and_isolates_rows():
    operator = Recording(torch.eye(2).repeat(3, 1, 1), fail=(1, 0))
    active = torch.tensor([True, True, False])
    out, failed = product(operator, torch.ones(3, 2, dtype=torch.float64), active)
    assert out.dtype == torch.float64
    torch.testing.assert_close(
        out, torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    )
    assert failed.tolist() == [False, True, False]


def test_product_refuses_a_wrong_shape():
    class Wrong(Recording):
        def matvec(self, v, active=None):
            return v[:, :1]

    with pytest.raises(ValueError, match=r"returned shape \(1, 1\), expected \(1, 2\)"):
        product(
            Wrong(torch.eye(2)[None]),
            torch.ones(1, 2, dtype=torch.float64),
            torch.tensor([True]),
        )


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1.0, 1e200, 1e300])
def test_norm_neither_underflows_nor_overflows(scale):
    x = scale * torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(
        norm(x) / scale, torch.tensor([5.0, 0.0], dtype=torch.float64)
    )


def test_default_generator_is_the_same_each_time_and_not_the_global_one():
    before = torch.random.get_rng_state()
    a, b = own_generator(None), own_generator(None)
    assert torch.equal(torch.randn(3, generator=a), torch.randn(3, generator=b))
    assert torch.equal(before, torch.random.get_rng_state())
    given = torch.Generator()
    assert own_generator(given) is given
