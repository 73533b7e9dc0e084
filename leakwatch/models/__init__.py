"""The papers' architectures, their initialisations, and a classifier to train them."""

from __future__ import annotations

from leakwatch.models.classifier import LitClassifier
from leakwatch.models.initialization import (
    Scheme,
    initialize,
    register_scheme,
    registered_schemes,
)
from leakwatch.models.lenet import LeNet
from leakwatch.models.mlp import MLP
from leakwatch.models.registry import build_model, register_model, registered_models
from leakwatch.models.resnet import ResNet8, ResNet18

register_model("lenet", LeNet)
register_model("mlp", MLP)
register_model("resnet8", ResNet8)
register_model("resnet18", ResNet18)

__all__ = [
    "MLP",
    "LeNet",
    "LitClassifier",
    "ResNet8",
    "ResNet18",
    "Scheme",
    "build_model",
    "initialize",
    "register_model",
    "register_scheme",
    "registered_models",
    "registered_schemes",
]
