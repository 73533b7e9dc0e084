from __future__ import annotations

import pytest
import torch
from cases import dense_jacobian, relative
from layer_kinds import IMAGES, KINDS, network
from torch import nn

from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.gram import conv_factors, forms
from leakwatch.derivatives.gram.conv_factors import Workspace
from leakwatch.derivatives.gram.gram import Gram, columns_stored, gram

ACTIVATIONS = {"smooth": nn.Tanh, "piecewise": nn.ReLU}
# Not every parameter of these comes apart, or only in two calls, so Δ is not known.
NOT_RANGED = {
    *("prelu", "transposed", "conv-frozen-weight", "instance-norm"),
    *("conv-twice", "conv-tied", "batch-norm", "group-norm", "batch-norm-1d"),
    *("depthwise", "layer-norm-of-images"),
}

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")


@pytest.fixture(autouse=True)
def _examined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examining a network takes longer than all that is tested here."""
    monkeypatch.setattr(GradientMap, "resolve", lambda *_: "vmap")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", KINDS)
def test_h_of_each_kind(name: str, activation: str) -> None:
    net, x, y = network(name, ACTIVATIONS[activation])
    at = GradientMap(net, dtype=torch.float64)
    space = Workspace()
    found = gram(at, x, y, workspace=space)
    rows = at.dense(x, y, torch.eye(x.numel()))
    g = at(x[None], y[None])[0]
    assert space.trusted
    assert not at.notes
    assert not at.formed
    assert torch.equal(found.h, found.h.T)
    assert relative(found.h, rows @ rows.T) < 1e-13
    assert relative(found.along, rows @ g / g.norm()) < 1e-12
    assert found.norm == pytest.approx(float(g.norm()), rel=1e-13)
    assert sum(found.traces.values()) == pytest.approx(float(found.h.trace()))
    assert columns_stored(at, x, y) <= at.size + 4 * len(found.traces)


@pytest.mark.parametrize("name", ["conv-wide", "attention", "conv-twice", "grouped"])
def test_the_oracle_agrees_with_double_backward(name: str) -> None:
    net, x, y = network(name, nn.ReLU)
    _, jacobian = dense_jacobian(net, x, y)
    found = gram(GradientMap(net, dtype=torch.float64), x, y)
    assert relative(found.h, jacobian.T @ jacobian) < 1e-13


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "name",
    ["conv-padded", "conv-wide", "depthwise", "linear", "attention", "linear-twice"],
)
def test_ends_of_the_spectrum_in_float32(name: str, activation: str) -> None:
    net, x, y = network(name, ACTIVATIONS[activation])
    rows = GradientMap(net, dtype=torch.float64).dense(x, y, torch.eye(x.numel()))
    truth = torch.linalg.svdvals(rows).square()
    found = gram(GradientMap(net.float()), x.float(), y)
    values = torch.linalg.eigvalsh(found.h).flip(0)
    assert float(values[0]) == pytest.approx(float(truth[0]), rel=1e-6)
    resolved = truth > 1e-9 * truth[0]
    assert bool(resolved[: x.numel() // 2].all())
    torch.testing.assert_close(values[resolved], truth[resolved], rtol=1e-3, atol=0)


def _by(form: str, name: str, net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Gram:
    """H with one form for every layer that can have it."""
    asked: list[str] = []
    plain = forms.choose

    def chosen(layer: forms.Layer, n: int, known: int | None) -> str:
        kind, once = layer.calls[0].kind, len(layer.calls) == 1
        can = {
            "factors": kind == "conv" and layer.calls[0].groups == 1 and once,
            "isometric": kind == "linear",
            "ranged": kind in ("conv", "linear") and once and known is not None,
            "plain": True,
        }
        asked.append(form if can[form] else plain(layer, n, known))
        return asked[-1]

    monkeypatch.setattr("leakwatch.derivatives.gram.sources.choose", chosen)
    _, x, y = network(name, nn.Tanh)
    space = Workspace()
    found = gram(GradientMap(net, dtype=torch.float64), x, y, workspace=space)
    assert form in asked
    assert space.trusted
    return found


@pytest.mark.parametrize(
    ("form", "activation", "name"),
    [
        *(("factors", "smooth", k) for k in IMAGES if k.startswith("conv-")),
        ("isometric", "smooth", "linear"),
        ("isometric", "smooth", "linear-wide"),
        ("isometric", "smooth", "linear-tied"),
        ("isometric", "smooth", "linear-one-row"),
        ("isometric", "smooth", "linear-on-rows"),
        *(("ranged", "piecewise", k) for k in IMAGES if k not in NOT_RANGED),
        ("ranged", "piecewise", "linear"),
        ("ranged", "piecewise", "linear-no-bias"),
        ("ranged", "piecewise", "linear-one-row"),
        ("plain", "piecewise", "conv-wide"),
        ("plain", "smooth", "linear-tied"),
    ],
)
def test_each_form_wherever_it_can_be_used(
    form: str, activation: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Also where each part has to be done in many pieces.
    monkeypatch.setattr(conv_factors, "_BLOCK", 1)
    monkeypatch.setattr(forms, "_BLOCK", 1)
    net, x, y = network(name, ACTIVATIONS[activation])
    found = _by(form, name, net, monkeypatch)
    rows = GradientMap(net, dtype=torch.float64).dense(x, y, torch.eye(x.numel()))
    assert relative(found.h, rows @ rows.T) < 1e-13
