from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CASES, CLASSES, relative
from torch import Tensor, nn

import leakwatch
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.gram.gram import gram

BY_NAME = {case.name: case for case in CASES}


def mapped(name: str, parameters: Any = None) -> GradientMap:
    case = BY_NAME[name]
    at = GradientMap(case.module(), parameters=parameters, dtype=torch.float64)
    if case.path == "vmap":  # examining it takes longer than all that is tested here
        at._resolved = "vmap"
    return at


@pytest.mark.parametrize("name", ["lenet", "batchnorm", "transformer", "tied", "lstm"])
def test_parts_of_layers_add_up_to_h(name: str) -> None:
    case = BY_NAME[name]
    x, y = case.data(1)
    whole = gram(mapped(name), x[0], y[0], by_layer=True)
    total = torch.zeros_like(whole.h)
    once = dict(case.module().named_parameters())  # tied: by the first name alone
    for layer, trace in whole.traces.items():
        own = {key for key in once if key.rpartition(".")[0] == layer}
        only = mapped(name, lambda key, _, own=own: key in own)
        part = gram(only, x[0], y[0])
        total += part.h
        assert trace == pytest.approx(float(part.h.trace()), rel=1e-11)
        top = float(torch.linalg.eigvalsh(part.h)[-1])
        assert whole.largest[layer] == pytest.approx(top, rel=1e-8)
    assert relative(total, whole.h) < 1e-13


def test_the_table_of_a_batch() -> None:
    case = BY_NAME["lenet"]
    x, y = case.data(3)
    table = leakwatch.layer_attribution(
        case.module(), x, y, largest=True, dtype=torch.float64
    )
    assert table.layers == ("0", "2", "5")
    assert table.parameters == (30, 112, 111)
    assert table.largest is not None
    for i in range(3):
        h = gram(mapped("lenet"), x[i], y[i]).h
        assert float(table.trace[i].sum()) == pytest.approx(float(h.trace()))
        top = float(torch.linalg.eigvalsh(h)[-1])
        assert float(table.largest[i].max()) <= top * (1 + 1e-9)
        assert top <= float(table.largest[i].sum()) * (1 + 1e-9)
    torch.testing.assert_close(table.share.sum(1), torch.ones(3).double())
    lines = str(table).splitlines()
    assert lines[0].split() == ["layer", "parameters", "share", "of", "Σλ", "λ₁"]
    assert len(lines) == 4


def test_parameters_of_the_network_itself() -> None:
    x, y = torch.rand(2, 5), torch.tensor([0, 1])
    table = leakwatch.layer_attribution(nn.Linear(5, CLASSES), x, y)
    assert table.layers == ("",)
    assert table.largest is None
    assert "(network)" in str(table)


def test_pixel_units() -> None:
    case = BY_NAME["mlp"]
    x, y = case.data(1)
    plain = leakwatch.layer_attribution(case.module(), x, y)
    scaled = leakwatch.layer_attribution(
        case.module(), x, y, input_scale=torch.full((36,), 2.0)
    )
    torch.testing.assert_close(scaled.trace, 4 * plain.trace, rtol=1e-5, atol=0)


# -- which parameters are shared -------------------------------------------------------


def names_of(parameters: object) -> list[str]:
    module = BY_NAME["lenet"].module()
    return list(GradientMap(module, parameters=parameters).sizes())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("5", ["5.weight", "5.bias"]),
        ("*.bias", ["0.bias", "2.bias", "5.bias"]),
        (["2.*", "5.weight"], ["2.weight", "2.bias", "5.weight"]),
        ("[02].weight", ["0.weight", "2.weight"]),
        (lambda name, p: p.ndim == 4, ["0.weight", "2.weight"]),
    ],
)
def test_names_patterns_and_functions(wanted: object, names: list[str]) -> None:
    assert names_of(wanted) == names


@pytest.mark.parametrize(
    ("wanted", "error", "text"),
    [
        ("head", ValueError, r"'head' matches none of .* '0\.weight'"),
        (["5", "nothing.*"], ValueError, r"'nothing\.\*' matches none"),
        (lambda *_: False, ValueError, "the function given matches none"),
        ([], ValueError, "names none"),
        (3, TypeError, "must be a name, a list of names, or a function"),
        ([3], TypeError, "must be a name"),
    ],
)
def test_what_matches_nothing_is_refused(
    wanted: object, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        names_of(wanted)


def test_frozen_parameters_are_not_shared() -> None:
    module = BY_NAME["lenet"].module()
    module[0].requires_grad_(False)  # type: ignore[index]
    assert list(GradientMap(module, parameters=["0", "2"]).sizes()) == [
        "2.weight",
        "2.bias",
    ]
    with pytest.raises(ValueError, match="are frozen"):
        GradientMap(module, parameters="0")


@pytest.mark.parametrize("name", ["lenet", "mlp-relu", "lstm"])
def test_a_map_of_some_parameters(name: str) -> None:
    case = BY_NAME[name]
    x, y = case.data(2)
    whole = GradientMap(case.module(), dtype=torch.float64)
    last = list(whole.sizes())[-1].rpartition(".")[0]
    some = GradientMap(case.module(), parameters=last, dtype=torch.float64)
    size = some.size
    assert size < whole.size

    def tail(rows: Tensor) -> Tensor:
        return rows[:, -size:]

    v, u = torch.rand(2, 36).double(), torch.rand(2, size).double()
    if x[0].numel() == 36:
        torch.testing.assert_close(some(x, y), tail(whole(x, y)))
        torch.testing.assert_close(some.jvp(x, y, v), tail(whole.jvp(x, y, v)))
        left = (some.vjp(x, y, u) * v).sum(1)
        torch.testing.assert_close(left, (u * some.jvp(x, y, v)).sum(1))
    single = some.in_dtype(torch.float32)
    assert single.size == size


def test_scores_of_what_is_shared() -> None:
    case = BY_NAME["lenet"]
    x, y = case.data(2)
    module = case.module()
    head = leakwatch.score(
        module, x, y, ["norms", "lavp"], parameters="5", solver="exact"
    )
    table = leakwatch.layer_attribution(module, x, y)
    torch.testing.assert_close(
        head["jacobian_norm"].square(), table.trace[:, 2], rtol=1e-4, atol=0
    )
    torch.testing.assert_close(head.traces["5"], table.trace[:, 2], rtol=1e-4, atol=0)


class _Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


def test_a_layer_whose_share_is_no_number_is_never_zero() -> None:
    """√ has an infinite slope at 0: the gradient is finite, its Jacobian is not."""
    net = nn.Sequential(_Root(), nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2))
    x = torch.tensor([[0.0, 0.5, 0.2, 0.3]])
    table = leakwatch.layer_attribution(net, x, torch.tensor([0]), largest=True)
    assert table.largest is not None
    assert not bool(torch.isfinite(table.trace).any())
    assert not bool(torch.isfinite(table.largest).any())


def test_what_becomes_of_inputs_counts() -> None:
    case = BY_NAME["lenet"]
    x, y = case.data(2)
    scaled = leakwatch.layer_attribution(
        case.module(), x, y, prepare=lambda t: 3 * t, dtype=torch.float64
    )
    plain = leakwatch.layer_attribution(case.module(), 3 * x, y, dtype=torch.float64)
    torch.testing.assert_close(scaled.trace, 9 * plain.trace, rtol=1e-10, atol=0)
