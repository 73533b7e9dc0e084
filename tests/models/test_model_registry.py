from __future__ import annotations

import pytest
from torch import nn

from leakwatch.models import LeNet, build_model, register_model, registered_models
from leakwatch.models import registry as registry_module

SIZES = {"in_channels": 1, "num_classes": 4, "image_size": 8}


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_MODELS", dict(registry_module._MODELS))


def linear(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes)
    )


def test_registered_names() -> None:
    assert registered_models() == (
        "alexnet",
        "cifar100_cnn",
        "femnist_cnn",
        "lenet",
        "linear",
        "mlp",
        "resnet152",
        "resnet18",
        "resnet8",
        "shufflenet_v2",
        "sme_lenet",
        "sme_resnet8",
        "sme_vit",
        "vgg9",
        "vit_b_16",
    )


def test_build_passes_model_args() -> None:
    net = build_model("lenet", **SIZES, model_args={"activation": "tanh"})
    assert isinstance(net, LeNet)
    assert net.fc.out_features == 4
    assert isinstance(net.features[1], nn.Tanh)


def test_registered_builder_is_found() -> None:
    register_model("toy", linear)
    assert "toy" in registered_models()
    assert build_model("toy", **SIZES)[1].in_features == 64


def test_duplicate_raises() -> None:
    with pytest.raises(ValueError, match="'lenet' is already registered"):
        register_model("lenet", linear)


def test_builder_must_take_the_shared_keywords() -> None:
    def bad(num_classes: int) -> nn.Module:
        return nn.Linear(1, num_classes)

    with pytest.raises(ValueError, match="lacks in_channels, image_size"):
        register_model("bad", bad)


def test_open_ended_builder_gets_everything() -> None:
    seen: dict[str, object] = {}

    def open_ended(**kwargs: object) -> nn.Module:
        seen.update(kwargs)
        return nn.Identity()

    register_model("open", open_ended)
    build_model("open", **SIZES, model_args={"depth": 3})
    assert seen == {**SIZES, "depth": 3}


def test_unknown_model_lists_the_registered() -> None:
    with pytest.raises(ValueError, match="registered: alexnet, cifar100_cnn, fem"):
        build_model("vgg", **SIZES)


def test_unknown_model_args_list_the_known() -> None:
    with pytest.raises(ValueError, match=r"no argument 'width'; .*: activation"):
        build_model("lenet", **SIZES, model_args={"width": 3})
    with pytest.raises(ValueError, match="may contain: nothing"):
        build_model("vit_b_16", **SIZES, model_args={"width": 3})


def test_shared_keywords_do_not_belong_in_model_args() -> None:
    with pytest.raises(ValueError, match="model_args contains num_classes"):
        build_model("lenet", **SIZES, model_args={"num_classes": 3})
