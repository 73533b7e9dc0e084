from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CASES, mlp
from torch import Tensor, nn
from torch.nn import functional as F

from leakwatch.derivatives import GradientMap, UnsupportedModuleError

BY_NAME = {case.name: case for case in CASES}


class TestErrors:
    x, y = BY_NAME["mlp"].data(2, torch.float32)

    def test_not_a_module(self) -> None:
        with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got a func"):
            GradientMap(lambda x: x)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"dtype": torch.bfloat16}, r"torch.float32 or torch.float64.*bfloat16"),
            ({"path": "fast"}, "'auto', 'vmap' or 'loop', got 'fast'"),
            ({"chunk_size": 0}, "at least 1, got 0"),
            ({"chunk_size": 2.5}, "at least 1, got 2.5"),
        ],
    )
    def test_arguments(self, arguments: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            GradientMap(mlp(), **arguments)

    def test_modules_without_a_gradient_to_share(self) -> None:
        with pytest.raises(ValueError, match=r"requires_grad=True.*unfreeze"):
            GradientMap(mlp().requires_grad_(False))
        with pytest.raises(ValueError, match=r"lazy modules.*forward pass first"):
            GradientMap(nn.LazyLinear(3))
        with pytest.raises(ValueError, match="on the device 'meta'"):
            GradientMap(mlp().to("meta"))
        with pytest.raises(ValueError, match="complex parameters"):
            GradientMap(nn.Linear(3, 2, dtype=torch.complex64))

    @pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
    def test_scripted_modules(self) -> None:
        traced = torch.jit.trace(mlp(), self.x)
        with pytest.raises(UnsupportedModuleError, match="scripted or traced"):
            GradientMap(nn.Sequential(traced))

    def test_inputs(self) -> None:
        at = GradientMap(mlp())
        with pytest.raises(ValueError, match=r"got torch.uint8.*x.float\(\) / 255"):
            at(self.x.byte(), self.y)
        with pytest.raises(ValueError, match=r"one label per sample.*\(1,\)"):
            at(self.x, self.y[:1])
        with pytest.raises(ValueError, match="at least one sample"):
            at(self.x[:0], self.y[:0])
        with pytest.raises(ValueError, match=r"v must have shape \(2, 36\)"):
            at.jvp(self.x, self.y, self.x)
        with pytest.raises(ValueError, match=r"u must have shape \(2, .*got \(2, 3\)"):
            at.vjp(self.x, self.y, torch.zeros(2, 3))
        with pytest.raises(ValueError, match=r"weight must have shape \(2,\)"):
            at(self.x, self.y, torch.ones(3))

    def test_outputs(self) -> None:
        pair = nn.Module()
        pair.net = mlp()
        pair.forward = lambda x: (pair.net(x), x)  # type: ignore[method-assign]
        with pytest.raises(TypeError, match=r"returned a tuple \(Tensor, Tensor\)"):
            GradientMap(pair)(self.x, self.y)
        with pytest.raises(ValueError, match=r"one loss per sample.*returned shape \("):
            GradientMap(mlp(), lambda m, x, y: m(x).mean())(self.x, self.y)
        with pytest.raises(ValueError, match="returned a NoneType"):
            GradientMap(mlp(), lambda m, x, y: None)(  # type: ignore[arg-type]
                self.x, self.y
            )

    @pytest.mark.parametrize("path", ["auto", "vmap", "loop"])
    @pytest.mark.parametrize("p", [0.5, 0.02])
    def test_random_forward(self, path: Any, p: float) -> None:
        net = nn.Sequential(mlp())
        net.register_forward_pre_hook(lambda m, args: F.dropout(args[0], p))
        with pytest.raises(UnsupportedModuleError, match="different results"):
            GradientMap(net, path=path)(self.x, self.y)

    def test_no_second_derivative(self) -> None:
        class Cosine(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, h: Tensor) -> Tensor:
                return h.cos()

            @staticmethod
            def backward(ctx: Any, out: Tensor) -> Tensor:
                raise NotImplementedError("the derivative of cosine is missing")

        class Sine(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, h: Tensor) -> Tensor:
                ctx.save_for_backward(h)
                return h.sin()

            @staticmethod
            def backward(ctx: Any, out: Tensor) -> Tensor:
                return out * Cosine.apply(ctx.saved_tensors[0])

        class Activation(nn.Module):
            def forward(self, h: Tensor) -> Tensor:
                return Sine.apply(h)

        at = GradientMap(mlp(Activation))
        missing = r"2 \(Activation\).*by sample.*cosine is missing"
        with pytest.raises(UnsupportedModuleError, match=missing):
            at(self.x, self.y)

    def test_a_path_that_does_not_work(self) -> None:
        case = BY_NAME["lstm"]
        x, y = case.data()
        with pytest.raises(UnsupportedModuleError, match=r"path='vmap'.*core \(LSTM"):
            GradientMap(case.module(), path="vmap")(x, y)

    def test_an_error_of_the_module_surfaces_as_itself(self) -> None:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            GradientMap(mlp())(self.x[..., :5], self.y)


class Tied(nn.Module):
    """The weight of ``b`` is that of ``a``, under whose name it comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 3)
        self.b.weight = self.a.weight
        self.read: list[nn.Parameter] = []

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.b(torch.tanh(self.a(x.flatten(1)))))
        out: Tensor = self.c(h)
        return out + sum(p.sum() for p in self.read)


@pytest.mark.parametrize(
    "wanted",
    ["b", ["b.weight", "b.bias"], ["b.*"], lambda name, p: name.startswith("b.")],
)
def test_each_name_of_a_tied_tensor_stands_for_it(wanted: Any) -> None:
    module = Tied()
    x, y = torch.rand(1, 1, 3, 3).double(), torch.tensor([1])
    at = GradientMap(module, parameters=wanted, dtype=torch.float64)
    assert at.sizes() == {"a.weight": 81, "b.bias": 9}
    whole = GradientMap(module, dtype=torch.float64)
    rows = whole.dense(x[0], y[0], torch.eye(9))
    # In the order of named_parameters(): a.weight, a.bias, b.bias, …
    shared = torch.cat([rows[:, :81], rows[:, 90:99]], 1)
    torch.testing.assert_close(at.dense(x[0], y[0], torch.eye(9)), shared)


def test_a_refusal_says_that_a_parameter_is_tied() -> None:
    module = Tied()
    module.read = [module.a.weight]
    with pytest.raises(UnsupportedModuleError, match=r"'a.weight' \(tied: b.weight\)"):
        GradientMap(module)(torch.rand(2, 1, 3, 3), torch.tensor([0, 1]))
