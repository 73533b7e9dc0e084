"""Products from graphs against the dense Jacobian, and when they are not taken."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES, CLASSES, Case, dense_jacobian, function, relative
from layer_kinds import KINDS, network
from torch import Tensor, nn

from leakwatch import GradientJacobian
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.autodiff import pulled_by_reverse
from leakwatch.derivatives.graph_products import batch_products
from leakwatch.derivatives.graph_products.batch_products import BatchProducts
from leakwatch.derivatives.graph_products.recorded_graph import Recorded
from leakwatch.derivatives.layers import bilinear
from leakwatch.derivatives.layers.bilinear import Bilinear

BY_NAME = {case.name: case for case in CASES}
PLAIN = {"checkpoint": "a checkpoint would run again"}
ALONE = {
    "attention": "position belong to no layer",
    "tied": "a.bias, c.bias belong",
    "read-outside": "a.weight",
    "unused": "a.weight",
    "parameter-as-buffer": "a.weight",
    "old-weight-norm": "a.bias, a.weight_g, a.weight_v belong",
    "pruned": "a.weight_orig",
    "nested-functorch": "a.weight",
    "hooks": "depends on the others",
    "lstm": "core.weight_ih_l0, core.weight_hh_l0, core.bias_ih_l0 … belong",
    "gru": "core.weight_ih_l0",
    "item": "depends on the others",
    "writes-buffers": "depends on the others",
    "writes-attributes": "depends on the others",
    "remembers": "depends on the others",
    "renormalised": "a.weight",
}
BATCH = (
    *("lenet", "mlp", "mlp-relu-in-place", "batchnorm", "transformer", "groupnorm"),
    *("no-linear", "one-dimensional", "scalar-inputs", "shared-submodule"),
    *("linear-twice", "frozen", "dropout", "writes-into-input", "writes-after-linear"),
    *("tokens", "buffers", "fresh-zeros", "custom-old", "custom-wrong-jvp"),
    *("no-grad", "data", "hidden-backward"),
    *(c for c in BY_NAME if c == "grid-sample"),
)

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")


def jacobian_of(
    case: Case, batch: int = 3, dtype: torch.dtype = torch.float64, **options: Any
) -> GradientJacobian:
    at = GradientMap(case.module(), dtype=dtype, **options)
    return GradientJacobian(at, *case.data(batch, dtype))


def directions(j: GradientJacobian) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (j.shape[2], j.shape[1])
    v, u = (torch.randn(j.shape[0], n, generator=generator).double() for n in sizes)
    return v.to(j.dtype), u.to(j.dtype)


def assert_right(
    j: GradientJacobian, net: Callable[[], nn.Module], tolerance: float
) -> None:
    """H v, J v and Jᵀ u of each sample against its dense Jacobian."""
    v, u = directions(j)
    operator = j.normal()
    h, there, back = operator.matvec(v), operator.forward(v), operator.backward(u)
    for i in range(len(j.x)):
        _, dense = dense_jacobian(net(), j.x[i].double(), j.y[i])
        dense = dense / j.scale[i]
        vi, ui = v[i].double(), u[i].double()
        assert relative(h[i], dense.T @ (dense @ vi)) < tolerance
        assert relative(there[i], dense @ vi) < tolerance
        assert relative(back[i], dense.T @ ui) < tolerance


@pytest.mark.parametrize("name", [*BATCH, *ALONE, *PLAIN])
def test_products_are_those_of_the_dense_jacobian(name: str) -> None:
    j = jacobian_of(BY_NAME[name])
    assert j.products.way is None
    assert_right(j, BY_NAME[name].reference, 1e-12)
    way = "alone" if name in ALONE else "plain" if name in PLAIN else "batch"
    assert j.products.way == way
    assert (ALONE | PLAIN).get(name, "") in j.products.why
    assert (j.products.why == "") == (way == "batch")


@pytest.mark.parametrize(
    "name", ["lenet", "batchnorm", "attention", "transformer", "lstm", "fresh-zeros"]
)
def test_in_float32(name: str) -> None:
    j = jacobian_of(BY_NAME[name], dtype=torch.float32)
    assert_right(j, BY_NAME[name].reference, 1e-5)
    assert j.products.way != "plain"


@pytest.mark.parametrize("short", [True, False], ids=["short", "formed"])
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_layer(
    name: str, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bilinear, "fewer_operations", lambda *_: short)
    # Examining a network takes longer than all that is tested here.
    monkeypatch.setattr(GradientMap, "resolve", lambda *_: "vmap")
    net, x, _ = network(name, nn.Tanh)
    xs = torch.stack([x, x.flip(-1) + 0.1, -x])
    at = GradientMap(net, dtype=torch.float64)
    # What an examination finds where there is a layer normalisation.
    at._pull = pulled_by_reverse
    j = GradientJacobian(at, xs, torch.arange(3))
    v, u = directions(j)
    operator = j.normal()
    found = operator.forward(v), operator.backward(u), operator.matvec(v)
    assert j.products.way != "plain", j.products.why
    w = 1 / j.scale
    there = at.jvp(xs, j.y, v, w)
    back = at.vjp(xs, j.y, there, w)
    expected = there, at.vjp(xs, j.y, u, w), back
    for one, other in zip(found, expected, strict=True):
        assert relative(one, other) < 1e-12


def test_the_smaller_form_is_chosen() -> None:
    assert bilinear.fewer_operations(1, 10, 1000)
    assert bilinear.fewer_operations(16, 512, 512 * 9)  # 3 · 16 < 4 · 461
    assert not bilinear.fewer_operations(1024, 16, 16 * 9)
    assert not bilinear.fewer_operations(1, 1, 3)  # 3 · 4 = 4 · 3


class Mixing(nn.Module):
    """Values of a sample alone, derivatives of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(36, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1).sin()
        return self.body(x + x.mean(0) - x.mean(0).detach())


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2, track_running_stats=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)).sigmoid().flatten(1))


class OneByOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(36, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.reshape(1, 36).sin())


@pytest.mark.parametrize("build", [Mixing, Statistics, OneByOne])
def test_samples_that_are_mixed_are_evaluated_alone(build: type[nn.Module]) -> None:
    case = Case("", build)
    j = jacobian_of(case)
    assert_right(j, case.reference, 1e-12)
    assert j.products.way == "alone"
    # Another batch of the same network is not tried in one piece again.
    assert j.gradients.together == (build is not Mixing)
    again = GradientJacobian(j.gradients, j.x, j.y)
    assert_right(again, case.reference, 1e-12)
    assert again.products.way == "alone"


@pytest.mark.parametrize("wrong", ["gradient", "push", "pull", "normal"])
@pytest.mark.parametrize("name", ["mlp", "item"])
@pytest.mark.parametrize(
    ("dtype", "by", "tol"), [(torch.float64, 1e-6, 1e-12), (torch.float32, 1e-2, 1e-4)]
)
def test_a_layer_that_gives_something_else_is_not_used(
    name: str,
    wrong: str,
    dtype: torch.dtype,
    by: float,
    tol: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = getattr(Bilinear, wrong)

    def off(form: Bilinear, *given: Any) -> Any:
        first, *rest = plain(form, *given)
        return [first * (1 + by), *rest]

    monkeypatch.setattr(Bilinear, wrong, off)
    j = jacobian_of(BY_NAME[name], dtype=dtype)
    assert_right(j, BY_NAME[name].reference, tol)
    assert not bool(j.products.shown.any())  # of the plain products nothing is known
    assert j.products.way == "plain"
    assert "differs" in j.products.why
    assert j.gradients.unrecorded == j.products.why


@pytest.mark.parametrize("name", ["lenet", "transformer", "lstm"])
def test_results_do_not_depend_on_groups(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = jacobian_of(BY_NAME[name], 5)
    v, u = directions(whole)
    expected = [whole.normal().matvec(v), whole.normal().backward(u)]
    for options, held in (
        ({"chunk_size": 1}, 2**30),
        ({"chunk_size": 3}, 2**30),
        ({"chunk_size": 2}, 0),
    ):
        monkeypatch.setattr(batch_products, "_HELD_BYTES", held)
        j = jacobian_of(BY_NAME[name], 5, **options)
        found = [j.normal().matvec(v), j.normal().backward(u)]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_products_are_checked_without_another_second_derivative(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    j = jacobian_of(BY_NAME["lenet"], dtype=torch.float32)
    precise = jacobian_of(BY_NAME["lenet"])
    v, _ = directions(precise)
    expected = precise.matvec(v)

    def second(*_: object) -> None:
        raise AssertionError("it has been differentiated twice")

    for name in ("jvp", "vjp"):
        monkeypatch.setattr(GradientMap, name, second)
    found = j.normal().forward(v.float())
    assert relative(found * j.scale[:, None], expected) < 1e-5
    j.normal().backward(found)
    assert j.products.way == "batch"
    assert bool(j.products.shown.all())
    # As much as J rounds, and nothing like what a comparison lets pass.
    size = found.norm(dim=1)
    assert bool((j.products.rounding > 1e-9 * size).all())
    assert bool((j.products.rounding < 1e-5 * size).all())


def test_most_of_the_samples_come_as_all_of_them_do() -> None:
    j = jacobian_of(BY_NAME["lenet"], 4)
    v, u = directions(j)
    active = torch.tensor([True, True, False, True])
    for product, given in ((j.normal().forward, v), (j.normal().backward, u)):
        whole = product(given)
        some = product(given, active)
        torch.testing.assert_close(some[active], whole[active])
        assert not bool(some[~active].any())


def test_a_part_of_the_samples_in_any_order() -> None:
    j = jacobian_of(BY_NAME["lenet"], 6)
    v, _ = directions(j)
    expected = j.products.normal(v)
    for rows in ([4, 1], [5], [1], [0, 1, 2, 3, 4, 5], [3, 5, 0, 1]):
        found = j.products.normal(v[rows], torch.tensor(rows))
        torch.testing.assert_close(found, expected[rows], rtol=1e-12, atol=1e-14)


def test_memory_decides_how_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    plain = Recorded.__init__

    def counted(graph: Recorded, *given: Any) -> None:
        sizes.append(len(given[3]))
        plain(graph, *given)

    monkeypatch.setattr(Recorded, "__init__", counted)
    j = jacobian_of(BY_NAME["lenet"], 4)
    # Inputs, their patches, and outputs twice; of the last layer, inputs twice.
    numbers = (36 + 81 + 54) + (27 + 9 * 27 + 72) + (2 * 36 + 6)
    monkeypatch.setattr(batch_products, "_GROUP_BYTES", 2 * 3 * 8 * numbers)
    v, _ = directions(j)
    j.products.normal(v)
    j.products.normal(v)
    assert sizes == [2, 2]  # held between products
    sizes.clear()
    monkeypatch.setattr(batch_products, "_HELD_BYTES", 0)
    other = jacobian_of(BY_NAME["lenet"], 4)
    other.products.normal(v)
    other.products.normal(v)
    assert sizes == [2] * 4


def test_memory_that_runs_out_is_asked_for_in_halves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    plain = Recorded.__init__

    def refusing(graph: Recorded, *given: Any) -> None:
        sizes.append(len(given[3]))
        if sizes[-1] > limit:
            raise MemoryError
        plain(graph, *given)

    monkeypatch.setattr(Recorded, "__init__", refusing)
    limit = 1
    j = jacobian_of(BY_NAME["lenet"], 4)
    assert_right(j, BY_NAME["lenet"].reference, 1e-12)
    assert sizes == [4, 2, 1, 1, 1, 1]
    assert j.products.way == "batch"
    limit = 0
    j = jacobian_of(BY_NAME["lenet"], 2)
    assert_right(j, BY_NAME["lenet"].reference, 1e-12)
    assert j.products.way == "plain"
    assert not j.gradients.unrecorded  # the next time there may be more


def test_other_weights_are_seen() -> None:
    case = BY_NAME["mlp"]
    net = case.module()
    j = GradientJacobian(GradientMap(net, dtype=torch.float64), *case.data(2))
    v, _ = directions(j)
    before = j.products.normal(v)
    with torch.no_grad():
        net[1].weight.mul_(2)
    w = 1 / j.scale
    expected = j.gradients.vjp(j.x, j.y, j.gradients.jvp(j.x, j.y, v, w), w)
    torch.testing.assert_close(j.products.normal(v), expected)
    assert relative(before, expected) > 0.1
    assert "have changed" in j.products.why


def test_samples_without_a_finite_gradient() -> None:
    case = BY_NAME["mlp"]
    x, y = case.data(3)
    x[0, 0, 0, 0] = torch.nan
    j = GradientJacobian(GradientMap(case.module(), dtype=torch.float64), x, y)
    v, _ = directions(j)
    found = j.products.normal(v)
    assert j.products.way == "batch"
    assert bool(torch.isnan(found[0]).all())
    for i in (1, 2):
        _, dense = dense_jacobian(case.reference(), x[i], y[i])
        dense = dense / j.scale[i]
        assert relative(found[i], dense.T @ dense @ v[i]) < 1e-12
    nothing = GradientJacobian(j.gradients, x[:1], y[:1])
    assert bool(torch.isnan(nothing.products.normal(v[:1])).all())
    assert nothing.products.way == "plain"
    assert not j.gradients.unrecorded


@pytest.mark.parametrize("parameters", ["b", "*.bias", ["a.weight"]])
def test_only_some_parameters(parameters: Any) -> None:
    build = function(lambda m, x: m.b(torch.tanh(m.a(x))))
    case = Case("", build)
    j = jacobian_of(case, parameters=parameters)
    net = case.reference()
    kept = j.gradients.sizes().keys()
    for name, p in net.named_parameters():
        p.requires_grad_(name in kept)
    assert_right(j, lambda: net, 1e-12)
    # A bias alone belongs to no layer: a layer is its weight.
    assert j.products.way == ("alone" if parameters == "*.bias" else "batch")


def test_a_graph_is_freed_with_its_jacobian() -> None:
    j = jacobian_of(BY_NAME["lenet"])
    v, _ = directions(j)
    j.products.normal(v)
    leaf = weakref.ref(j.products._groups[0].graph._leaf)
    assert leaf() is not None
    gc.collect()
    gc.disable()
    try:
        del j
        assert leaf() is None
    finally:
        gc.enable()


class Pointwise(nn.Module):
    """What comes before two layers is not smooth at every input."""

    def __init__(self, before: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before = before
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(self.before(x)).tanh())
        return out


def scaled_by_a_determinant(x: Tensor) -> Tensor:
    return x * torch.linalg.det(x[:, :4].reshape(-1, 2, 2))[:, None]


def standardised(x: Tensor) -> Tensor:
    spread = x.std(1, keepdim=True) + 1e-3
    return (x - x.mean(1, keepdim=True)) / spread


@pytest.mark.parametrize("before", [scaled_by_a_determinant, standardised])
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_sample_with_another_second_derivative_is_found_wherever_it_is(
    before: Callable[[Tensor], Tensor], odd: int
) -> None:
    torch.manual_seed(0)
    gradients = GradientMap(Pointwise(before), dtype=torch.float64)
    x, y = torch.randn(3, 6, dtype=torch.float64), torch.tensor([0, 1, 2])
    x[odd] = 1.0  # a singular matrix, and no spread
    g = gradients(x, y)
    length = g.norm(dim=1)
    one = torch.ones(3, dtype=torch.float64)
    unit = g / length.clamp_min(1e-300)[:, None]
    products = BatchProducts(gradients, x, y, one, unit, length)
    v = torch.randn(3, 6, dtype=torch.float64)
    expected = gradients.vjp(x, y, gradients.jvp(x, y, v))
    torch.testing.assert_close(products.normal(v), expected, equal_nan=True)


@pytest.mark.parametrize("rows", [[0, 0], [-1], [3], []])
def test_rows_are_different_samples_of_the_batch(rows: list[int]) -> None:
    gradients = GradientMap(nn.Linear(4, 3), dtype=torch.float64)
    x, y = torch.rand(3, 4, dtype=torch.float64), torch.tensor([0, 1, 2])
    g = gradients(x, y)
    length = g.norm(dim=1)
    one = torch.ones(3, dtype=torch.float64)
    products = BatchProducts(gradients, x, y, one, g / length[:, None], length)
    v = torch.rand(len(rows), 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="rows"):
        products.normal(v, torch.tensor(rows, dtype=torch.long))
    assert gradients.together
