from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leakwatch.models import MLP, LeNet, ResNet8, ResNet18

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int], int, int]] = {
    # name: builder, image shape, classes, parameters counted by hand
    "lenet-28": (LeNet, (1, 28, 28), 10, 312 + 3 * 3612 + 588 * 10 + 10),
    "lenet-32": (
        lambda: LeNet(3, 10, 32, activation="tanh"),
        (3, 32, 32),
        10,
        912 + 3 * 3612 + 768 * 10 + 10,
    ),
    "lenet-rectangle": (
        lambda: LeNet(2, 3, (9, 14), activation="relu"),
        (2, 9, 14),
        3,
        (2 * 25 * 12 + 12) + 3 * 3612 + (12 * 3 * 4 * 3 + 3),
    ),
    "mlp": (
        lambda: MLP(1, 4, 6, hidden_sizes=[5, 7], activation="sigmoid"),
        (1, 6, 6),
        4,
        36 * 5 + 5 + 5 * 7 + 7 + 7 * 4 + 4,
    ),
    "linear": (lambda: MLP(3, 4, 6, hidden_sizes=()), (3, 6, 6), 4, 108 * 4 + 4),
    "resnet8": (ResNet8, (3, 32, 32), 10, 78_042),
    "resnet8-gelu": (
        lambda: ResNet8(1, 3, 8, activation="gelu"),
        (1, 8, 8),
        3,
        78_042 - 2 * 144 - 7 * 65,
    ),
    "resnet18": (lambda: ResNet18(3, 10, 8), (3, 8, 8), 10, 11_173_962),
}
cases = pytest.mark.parametrize("name", CASES)


def build(name: str) -> tuple[nn.Module, Tensor, int]:
    torch.manual_seed(0)
    builder, shape, classes, _ = CASES[name]
    return builder().eval(), torch.rand(2, *shape), classes


@cases
def test_logits_have_one_row_per_sample(name: str) -> None:
    net, x, classes = build(name)
    assert net(x).shape == (2, classes)


@cases
def test_parameter_count(name: str) -> None:
    net, _, _ = build(name)
    assert sum(p.numel() for p in net.parameters()) == CASES[name][3]


@cases
def test_samples_do_not_mix_in_eval_mode(name: str) -> None:
    net, x, _ = build(name)
    torch.testing.assert_close(net(x)[:1], net(x[:1]), rtol=1e-4, atol=1e-5)


@cases
def test_per_sample_gradients_by_vmap_equal_a_loop(name: str) -> None:
    net, x, _ = build(name)
    y = torch.tensor([0, 2])
    state = {k: v.detach() for k, v in net.named_parameters()}
    buffers = dict(net.named_buffers())

    def loss(params: dict[str, Tensor], xi: Tensor, yi: Tensor) -> Tensor:
        logits = torch.func.functional_call(net, (params, buffers), (xi[None],))
        return F.cross_entropy(logits, yi[None])

    batched = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(state, x, y)
    for i in range(2):
        single = torch.autograd.grad(
            F.cross_entropy(net(x[i : i + 1]), y[i : i + 1]), list(net.parameters())
        )
        for key, expected in zip(state, single, strict=True):
            torch.testing.assert_close(batched[key][i], expected, rtol=1e-3, atol=1e-5)


@cases
def test_gradient_depends_on_the_input(name: str) -> None:
    net, x, _ = build(name)
    x.requires_grad_()
    loss = F.cross_entropy(net(x), torch.tensor([0, 2]))
    grads = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
    (back,) = torch.autograd.grad(sum((g * g).sum() for g in grads), x)
    assert back.isfinite().all()
    assert back.flatten(1).norm(dim=1).min() > 0


@pytest.mark.parametrize(("side", "features"), [(28, 588), (32, 768)])
def test_lenet_is_table_1(side: int, features: int) -> None:
    net = LeNet(image_size=side)
    convs = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    assert [c.stride for c in convs] == [(2, 2), (2, 2), (1, 1), (1, 1)]
    assert {(c.kernel_size, c.padding) for c in convs} == {((5, 5), (2, 2))}
    assert {c.out_channels for c in convs} == {12}
    assert sum(isinstance(m, nn.Sigmoid) for m in net.modules()) == 4
    assert net.fc.in_features == features


def test_mlp_default_widths() -> None:
    widths = [m.out_features for m in MLP().modules() if isinstance(m, nn.Linear)]
    assert widths == [256, 128, 10]


def test_resnet18_keeps_small_images_large() -> None:
    net = ResNet18().eval().net
    assert net.conv1.kernel_size == (3, 3)
    shapes = []
    for layer in (net.conv1, net.layer1, net.layer2, net.layer3, net.layer4):
        layer.register_forward_hook(lambda m, i, out: shapes.append(out.shape[-1]))
    net(torch.zeros(1, 3, 32, 32))
    assert shapes == [32, 32, 16, 8, 4]


def test_resnet18_relu_is_not_in_place() -> None:
    relus = [m for m in ResNet18().modules() if isinstance(m, nn.ReLU)]
    assert len(relus) == 9
    assert not any(m.inplace for m in relus)


def test_resnet8_stage_resolution() -> None:
    net = ResNet8()
    assert net.stages(net.stem(torch.zeros(1, 3, 32, 32))).shape == (1, 64, 8, 8)


def test_every_relu_of_resnet18_can_be_another_activation() -> None:
    net = ResNet18(activation="sigmoid").eval()
    assert not [m for m in net.modules() if isinstance(m, nn.ReLU)]
    seen = []
    for module in net.modules():
        if isinstance(module, nn.Sigmoid):
            module.register_forward_hook(lambda m, i, out: seen.append(out))
    net(torch.randn(2, 3, 32, 32))
    # The stem's, and two of each of eight blocks.
    assert len(seen) == 17
    assert all(bool(((out > 0) & (out < 1)).all()) for out in seen)
    with pytest.raises(ValueError, match="sigmoid"):
        ResNet18(activation="sigmoids")


@pytest.mark.parametrize("builder", [LeNet, MLP, ResNet8, ResNet18])
@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"in_channels": 0}, ValueError, "in_channels must be at least 1, got 0"),
        ({"num_classes": "ten"}, TypeError, "num_classes must be an integer"),
        ({"num_classes": True}, TypeError, "num_classes must be an integer"),
        ({"image_size": 0}, ValueError, "image_size must be at least 1"),
        ({"image_size": (1, 28, 28)}, TypeError, r"\(height, width\)"),
        ({"image_size": 28.0}, TypeError, "image_size must be an integer"),
        ({"image_size": "28"}, TypeError, "image_size must be an integer"),
    ],
)
def test_bad_sizes(
    builder: Callable[..., nn.Module],
    kwargs: dict[str, object],
    error: type[Exception],
    match: str,
) -> None:
    with pytest.raises(error, match=match):
        builder(**kwargs)


@pytest.mark.parametrize("builder", [LeNet, MLP, ResNet8])
def test_unknown_activation_lists_the_known(builder: Callable[..., nn.Module]) -> None:
    with pytest.raises(ValueError, match="'swish'; known: gelu, relu, sigmoid, tanh"):
        builder(activation="swish")


def test_mlp_hidden_sizes_must_be_a_sequence() -> None:
    with pytest.raises(TypeError, match=r"hidden_sizes=\(256, 128\), got 256"):
        MLP(hidden_sizes=256)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hidden_sizes must be at least 1"):
        MLP(hidden_sizes=(16, 0))
