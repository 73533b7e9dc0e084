"""The papers' architectures, their initialisations, and modules that train them.

A new architecture is one file in ``architectures/`` and one line below that registers
it; ``classifier`` trains any of them, ``fedavg`` does so by federated averaging.
"""

from __future__ import annotations

from leakwatch.models.architectures.alexnet import AlexNet
from leakwatch.models.architectures.lenet import LeNet
from leakwatch.models.architectures.linear import LinearClassifier
from leakwatch.models.architectures.mlp import MLP
from leakwatch.models.architectures.resnet import ResNet8, ResNet18, ResNet152
from leakwatch.models.architectures.shufflenet import ShuffleNetV2
from leakwatch.models.architectures.sme_cnn import CIFAR100CNN, FEMNISTCNN
from leakwatch.models.architectures.sme_lenet import SMELeNet
from leakwatch.models.architectures.sme_resnet8 import SMEResNet8
from leakwatch.models.architectures.sme_vit import SMEViT
from leakwatch.models.architectures.vgg import VGG9
from leakwatch.models.architectures.vit import ViTB16
from leakwatch.models.classifier import LitClassifier
from leakwatch.models.fedavg import FedAvgModule
from leakwatch.models.initialization import (
    Scheme,
    initialize,
    register_scheme,
    registered_schemes,
)
from leakwatch.models.registry import build_model, register_model, registered_models

register_model("alexnet", AlexNet)
register_model("cifar100_cnn", CIFAR100CNN)
register_model("femnist_cnn", FEMNISTCNN)
register_model("lenet", LeNet)
register_model("linear", LinearClassifier)
register_model("mlp", MLP)
register_model("resnet8", ResNet8)
register_model("resnet18", ResNet18)
register_model("resnet152", ResNet152)
register_model("shufflenet_v2", ShuffleNetV2)
register_model("sme_lenet", SMELeNet)
register_model("sme_resnet8", SMEResNet8)
register_model("sme_vit", SMEViT)
register_model("vgg9", VGG9)
register_model("vit_b_16", ViTB16)

__all__ = [
    "CIFAR100CNN",
    "FEMNISTCNN",
    "MLP",
    "VGG9",
    "AlexNet",
    "FedAvgModule",
    "LeNet",
    "LinearClassifier",
    "LitClassifier",
    "ResNet8",
    "ResNet18",
    "ResNet152",
    "SMELeNet",
    "SMEResNet8",
    "SMEViT",
    "Scheme",
    "ShuffleNetV2",
    "ViTB16",
    "build_model",
    "initialize",
    "register_model",
    "register_scheme",
    "registered_models",
    "registered_schemes",
]
