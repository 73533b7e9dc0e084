"""Every registered architecture: shape, size, loss, gradient and its derivative."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import ResNet152_Weights, ViT_B_16_Weights

from leakwatch.derivatives import GradientMap
from leakwatch.models import LitClassifier, build_model, registered_models


def conv(fan_in: int, fan_out: int, kernel: int) -> int:
    return fan_in * fan_out * kernel**2 + fan_out


def fc(fan_in: int, fan_out: int) -> int:
    return fan_in * fan_out + fan_out


def published(weights: Any, classes: int) -> int:
    """torchvision's stated count for 1000 classes, with another last layer."""
    features = {ResNet152_Weights: 2048, ViT_B_16_Weights: 768}[weights]
    stated: int = weights.IMAGENET1K_V1.meta["num_params"]
    return stated - fc(features, 1000) + fc(features, classes)


@dataclass(frozen=True)
class Case:
    """An architecture at one input, with its parameters counted by hand."""

    model: str
    shape: tuple[int, int, int]
    classes: int
    count: int
    args: dict[str, Any] = field(default_factory=dict)
    kind: str = "small"  # "large": no derivatives; "huge": no memory either

    def build(self) -> nn.Module:
        channels, height, width = self.shape
        return build_model(
            self.model,
            in_channels=channels,
            num_classes=self.classes,
            image_size=(height, width),
            model_args=self.args,
        )

    def ready(self) -> tuple[nn.Module, Tensor, Tensor]:
        """The network in float64 and eval mode, two samples and their labels."""
        torch.manual_seed(0)
        net = self.build().double()
        norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
        for norm in norms:
            norm.momentum = None  # statistics of what it sees below, nothing else
        if norms:
            with torch.no_grad():
                net(torch.rand(8, *self.shape).double())
        x = torch.rand(2, *self.shape).double()
        return net.eval(), x, torch.tensor([0, 2])


# width 384: one patch, both tokens' positions, class token; qkv without bias
VIT_TOKENS = conv(1, 384, 28) + 384 + 2 * 384
VIT_PERCEPTRON = 2 * 384 + fc(384, 768) + fc(768, 384)
VIT_BLOCK = 384 * 1152 + fc(384, 384) + VIT_PERCEPTRON
VIT_HEAD = 2 * 384 + fc(384, 768) + fc(768, 62)
# a norm before attention in all blocks but the first
VIT_SME = VIT_TOKENS + 4 * VIT_BLOCK + 3 * 2 * 384 + VIT_HEAD

VGG_CONVS = [(3, 32), (32, 64), (64, 128), (128, 128), (128, 256), (256, 256)]
VGG_FEATURES = sum(conv(a, b, 3) for a, b in VGG_CONVS)
VGG_WIDTHS = sum(b for _, b in VGG_CONVS)

# convolutions without bias, BatchNorm with scale and shift, projections as shortcuts
SME_BLOCKS = [(32, 32), (32, 64), (64, 128)]
SME_RESNET = (
    2 * 32
    + sum(9 * a * b + 9 * b * b + 4 * b for a, b in SME_BLOCKS)
    + sum(a * b + 2 * b for a, b in SME_BLOCKS[1:])
)

CASES = {
    "linear": Case("linear", (1, 28, 28), 10, 7850),
    "linear-no-bias": Case("linear", (3, 5, 4), 3, 180, {"bias": False}),
    "lenet": Case("lenet", (1, 28, 28), 10, 312 + 3 * 3612 + fc(588, 10)),
    "lenet-tanh": Case(
        "lenet",
        (3, 32, 32),
        10,
        912 + 3 * 3612 + fc(768, 10),
        {"activation": "tanh"},
    ),
    "mlp-sme": Case(
        "mlp",
        (1, 28, 28),
        62,
        fc(784, 1000) + fc(1000, 1000) + fc(1000, 62),
        {"hidden_sizes": [1000, 1000]},
        "large",
    ),
    "sme-lenet": Case(
        "sme_lenet",
        (1, 28, 28),
        62,
        conv(1, 6, 5) + conv(6, 16, 5) + fc(400, 120) + fc(120, 84) + fc(84, 62),
    ),
    "sme-lenet-least": Case(
        "sme_lenet",
        (1, 12, 12),
        3,
        conv(1, 6, 5) + conv(6, 16, 5) + fc(16, 120) + fc(120, 84) + fc(84, 3),
    ),
    "femnist-cnn": Case(
        "femnist_cnn",
        (1, 28, 28),
        62,
        conv(1, 32, 3) + conv(32, 64, 3) + fc(3136, 100) + fc(100, 62),
    ),
    "cifar100-cnn": Case(
        "cifar100_cnn",
        (3, 32, 32),
        100,
        conv(3, 64, 3) + conv(64, 128, 3) + fc(8192, 200) + fc(200, 100),
        kind="large",
    ),
    "cifar100-cnn-least": Case(
        "cifar100_cnn",
        (3, 4, 4),
        5,
        conv(3, 64, 3) + conv(64, 128, 3) + fc(128, 200) + fc(200, 5),
    ),
    "alexnet": Case(
        "alexnet",
        (3, 32, 32),
        10,
        conv(3, 64, 11)
        + conv(64, 192, 5)
        + conv(192, 384, 3)
        + conv(384, 256, 3)
        + conv(256, 256, 3)
        + fc(256, 10),
    ),
    "alexnet-rectangle": Case(
        "alexnet",
        (3, 29, 61),
        10,
        2_472_266 + 256 * 10,
        {"activation": "gelu"},
        "large",
    ),
    "vgg9": Case(
        "vgg9",
        (3, 32, 32),
        10,
        VGG_FEATURES + fc(4096, 512) + fc(512, 512) + fc(512, 10),
        kind="large",
    ),
    "vgg9-least": Case(
        "vgg9",
        (1, 8, 8),
        10,
        VGG_FEATURES - 2 * 9 * 32 + fc(256, 512) + fc(512, 512) + fc(512, 10),
    ),
    "vgg9-batch-norm": Case(
        "vgg9",
        (3, 8, 8),
        10,
        # a bias less, a scale and a shift more for each channel
        VGG_FEATURES + VGG_WIDTHS + fc(256, 512) + fc(512, 512) + fc(512, 10),
        {"batch_norm": True},
        "large",
    ),
    "resnet8": Case("resnet8", (3, 8, 8), 10, 78_042),
    "resnet18": Case("resnet18", (3, 16, 16), 10, 11_173_962, kind="large"),
    "resnet18-imagenet": Case(
        "resnet18", (3, 32, 32), 1000, 11_689_512, {"small_stem": False}, "huge"
    ),
    "shufflenet-half": Case(
        # torchvision states 1,366,792 for 1000 classes
        "shufflenet_v2",
        (3, 8, 8),
        10,
        1_366_792 - fc(1024, 1000) + fc(1024, 10),
        {"width": 0.5},
    ),
    "shufflenet-imagenet": Case(
        # torchvision states 2,278,604
        "shufflenet_v2",
        (3, 64, 64),
        1000,
        2_278_604,
        {"small_stem": False},
        "huge",
    ),
    "shufflenet-grey": Case(
        "shufflenet_v2",
        (1, 16, 16),
        10,
        1_366_792 - fc(1024, 1000) + fc(1024, 10) - 2 * 9 * 24,
        {"width": 0.5},
        "large",
    ),
    "sme-resnet8": Case(
        "sme_resnet8",
        (1, 28, 28),
        62,
        9 * 32 + SME_RESNET + fc(2048, 1000) + fc(1000, 62),
        kind="large",
    ),
    "sme-resnet8-least": Case(
        "sme_resnet8",
        (3, 4, 3),
        3,
        9 * 3 * 32 + SME_RESNET + fc(128, 1000) + fc(1000, 3),
    ),
    "sme-vit": Case("sme_vit", (1, 28, 28), 62, VIT_SME, kind="large"),
    "sme-vit-patches": Case(
        "sme_vit",
        (3, 8, 4),
        3,
        conv(3, 8, 4)
        + 8  # class token
        + 3 * 8  # positions
        + 2 * (8 * 24 + fc(8, 8) + 2 * 8 + fc(8, 16) + fc(16, 8))
        + 2 * 8  # norm of the second block
        + (2 * 8 + fc(8, 768) + fc(768, 3)),
        {"patch_size": 4, "width": 8, "heads": 2, "depth": 2},
    ),
    "resnet152": Case(
        "resnet152", (3, 224, 224), 1000, published(ResNet152_Weights, 1000), {}, "huge"
    ),
    "vit-b-16": Case(
        "vit_b_16", (3, 224, 224), 1000, published(ViT_B_16_Weights, 1000), {}, "huge"
    ),
    "vit-b-16-small": Case(
        "vit_b_16",
        (1, 32, 32),
        10,
        # two channels of the patches and all but 4 + 1 of 196 + 1 positions fewer
        published(ViT_B_16_Weights, 10) - 2 * 256 * 768 - 192 * 768,
        {},
        "huge",
    ),
}
every = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
real = pytest.mark.parametrize(
    "case",
    [case for case in CASES.values() if case.kind != "huge"],
    ids=[name for name, case in CASES.items() if case.kind != "huge"],
)
small = pytest.mark.parametrize(
    "case",
    [case for case in CASES.values() if case.kind == "small"],
    ids=[name for name, case in CASES.items() if case.kind == "small"],
)


def gradient(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of one sample by plain autograd, flat."""
    loss = F.cross_entropy(net(x[None]), y[None])
    parts = torch.autograd.grad(loss, list(net.parameters()))
    return torch.cat([part.reshape(-1) for part in parts])


def relative(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).norm() / expected.norm())


def test_every_registered_model_has_a_case() -> None:
    assert {case.model for case in CASES.values()} == set(registered_models())


@every
def test_count_and_logits_without_memory(case: Case) -> None:
    with torch.device("meta"):
        net = case.build().eval()
        logits = net(torch.empty(2, *case.shape))
    assert sum(p.numel() for p in net.parameters()) == case.count
    assert logits.shape == (2, case.classes)


@real
def test_loss_is_finite_and_samples_do_not_mix(case: Case) -> None:
    net, x, y = case.ready()
    before = {name: value.clone() for name, value in net.named_buffers()}
    with torch.no_grad():
        logits = net(x)
        assert F.cross_entropy(logits, y).isfinite()
        torch.testing.assert_close(net(x[1:]), logits[1:], rtol=1e-9, atol=1e-11)
    for name, value in net.named_buffers():
        assert torch.equal(value, before[name])


@small
def test_gradient_and_its_derivative(case: Case) -> None:
    net, x, y = case.ready()
    gradients = GradientMap(net, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    v = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    v = v / v.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    found, pushed = gradients(x, y), gradients.jvp(x, y, v.flatten(1))
    h = 1e-6
    for i in range(2):
        assert relative(found[i], gradient(net, x[i], y[i])) < 1e-10
        ahead, behind = (gradient(net, x[i] + s * v[i], y[i]) for s in (h, -h))
        assert relative(pushed[i], (ahead - behind) / (2 * h)) < 1e-5
    assert gradients.path == "vmap"
    assert gradients.notes == ()


@small
def test_an_attack_step_moves_towards_the_target(case: Case) -> None:
    net, x, y = case.ready()
    target = gradient(net, x[0], y[0])
    leaf = x[0] + 0.01 * torch.randn(x[0].shape, dtype=torch.float64)
    leaf.requires_grad_()

    def distance(at: Tensor) -> Tensor:
        parts = torch.autograd.grad(
            F.cross_entropy(net(at[None]), y[:1]),
            list(net.parameters()),
            create_graph=True,
        )
        return (torch.cat([p.reshape(-1) for p in parts]) - target).square().sum()

    start = distance(leaf)
    (slope,) = torch.autograd.grad(start, leaf)
    # so short a step that hardly a ReLU or a maximum changes sides
    step = 1e-7 * start.item() / slope.square().sum()
    after = distance((leaf - step * slope).detach().requires_grad_())
    assert (start - after).item() == pytest.approx(1e-7 * start.item(), rel=1e-3)


@pytest.mark.parametrize("name", ["resnet18", "resnet152", "shufflenet_v2"])
def test_no_activation_works_in_place(name: str) -> None:
    with torch.device("meta"):
        net = build_model(name, in_channels=3, num_classes=2, image_size=32)
    relus = [m for m in net.modules() if isinstance(m, nn.ReLU)]
    assert relus
    assert not any(m.inplace for m in relus)


@pytest.mark.parametrize("name", ["resnet18", "shufflenet_v2"])
@pytest.mark.parametrize(("small_stem", "side"), [(True, 4), (False, 1)])
def test_small_stem_keeps_small_images_large(
    name: str, small_stem: bool, side: int
) -> None:
    shapes = []
    with torch.device("meta"):
        net = build_model(
            name,
            in_channels=3,
            num_classes=2,
            image_size=32,
            model_args={"small_stem": small_stem},
        ).eval()
        last = net.net.layer4 if name == "resnet18" else net.net.conv5
        last.register_forward_hook(lambda m, i, out: shapes.append(out.shape[2:]))
        net(torch.empty(1, 3, 32, 32))
    assert shapes == [(side, side)]


def test_type_a_attention_sees_the_bare_tokens() -> None:
    torch.manual_seed(0)
    net = build_model("sme_vit", in_channels=1, num_classes=3, image_size=28)
    seen = []
    net.blocks[0].attention.register_forward_hook(
        lambda m, args, out: seen.extend([args[0], out])
    )
    net.blocks[0].perceptron.register_forward_pre_hook(
        lambda m, args: seen.append(args[0])
    )
    x = torch.rand(1, 1, 28, 28)
    net(x)
    tokens, mixed, carried = seen
    assert tokens[0, 0].count_nonzero() == 0
    torch.testing.assert_close(
        tokens[0, 1], net.patches(x).flatten(), rtol=1e-6, atol=1e-6
    )
    assert torch.equal(carried, mixed)


def test_sme_networks_give_logits() -> None:
    torch.manual_seed(0)
    x = torch.rand(4, 1, 28, 28)
    for name in ("sme_lenet", "femnist_cnn", "sme_resnet8", "sme_vit"):
        sums = build_model(name, in_channels=1, num_classes=5, image_size=28)(x).sum(1)
        assert (sums - 1).abs().min() > 1e-3


@pytest.mark.parametrize("name", registered_models())
@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"in_channels": 0}, ValueError, "in_channels must be at least 1, got 0"),
        ({"in_channels": 3.0}, TypeError, "in_channels must be an integer"),
        ({"num_classes": True}, TypeError, "num_classes must be an integer"),
        ({"image_size": 0}, ValueError, "image_size must be at least 1"),
        ({"image_size": (1, 32, 32)}, TypeError, r"\(height, width\)"),
    ],
)
def test_bad_sizes(
    name: str, changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    sizes = {"in_channels": 3, "num_classes": 10, "image_size": 32}
    with torch.device("meta"), pytest.raises(error, match=match):
        build_model(name, **{**sizes, **changes})


@pytest.mark.parametrize(
    ("name", "size", "args", "match"),
    [
        ("alexnet", 28, {}, "AlexNet needs images of at least 29×29 .* got image_size"),
        ("vgg9", (8, 7), {}, "VGG9 needs images of at least 8×8 pixels"),
        ("sme_lenet", 11, {}, "SMELeNet needs images of at least 12×12"),
        ("femnist_cnn", 3, {}, "FEMNISTCNN needs images of at least 4×4"),
        ("cifar100_cnn", 3, {}, "CIFAR100CNN needs images of at least 4×4"),
        ("vit_b_16", 40, {}, "multiple of 16, such as image_size=224, got 40×40"),
        ("vit_b_16", (32, 48), {}, "square images"),
        ("sme_vit", 28, {"patch_size": 5}, "patch_size=5 doesn't divide .* 28×28"),
        ("sme_vit", 28, {"heads": 5}, "got width=384, heads=5"),
        ("sme_vit", 28, {"depth": 0}, "depth must be at least 1"),
        ("shufflenet_v2", 32, {"width": 0.75}, "0.5, 1.0, 1.5 or 2.0, got 0.75"),
        ("alexnet", 32, {"activation": "swish"}, "'swish'; known: gelu, relu"),
    ],
)
def test_what_an_architecture_refuses(
    name: str, size: Any, args: dict[str, Any], match: str
) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=match):
        build_model(
            name, in_channels=3, num_classes=10, image_size=size, model_args=args
        )


def test_chosen_by_name_in_the_classifier() -> None:
    net = LitClassifier("sme_lenet", num_classes=5, image_size=16)
    assert net(torch.zeros(2, 1, 16, 16)).shape == (2, 5)
