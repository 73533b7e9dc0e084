"""Data sets as LightningDataModules: one file each.

A new one subclasses ``ImageDataModule`` and says in ``load`` where its images are;
``ClientsDataModule`` divides any of them among federated clients.
"""

from __future__ import annotations

from leakwatch.datamodules.arrays import ArrayDataModule
from leakwatch.datamodules.base import ImageDataModule, Splits
from leakwatch.datamodules.cifar10 import CIFAR10DataModule
from leakwatch.datamodules.cifar100 import CIFAR100DataModule
from leakwatch.datamodules.client_dataset import ClientDataset, RoundSampler
from leakwatch.datamodules.clients import ClientsDataModule
from leakwatch.datamodules.dataset import ImageArrays, ImageDataset
from leakwatch.datamodules.emnist import EMNISTDataModule
from leakwatch.datamodules.fashion_mnist import FashionMNISTDataModule
from leakwatch.datamodules.femnist import FEMNISTDataModule
from leakwatch.datamodules.files import ImageFileDataset, ImageFiles
from leakwatch.datamodules.image_folder import ImageFolderDataModule
from leakwatch.datamodules.imagenet import ImageNetDataModule
from leakwatch.datamodules.imagenette import ImageNetteDataModule, ImageWoofDataModule
from leakwatch.datamodules.mnist import MNISTDataModule
from leakwatch.datamodules.mnist_sample import MNISTSample

__all__ = [
    "ArrayDataModule",
    "CIFAR10DataModule",
    "CIFAR100DataModule",
    "ClientDataset",
    "ClientsDataModule",
    "EMNISTDataModule",
    "FEMNISTDataModule",
    "FashionMNISTDataModule",
    "ImageArrays",
    "ImageDataModule",
    "ImageDataset",
    "ImageFileDataset",
    "ImageFiles",
    "ImageFolderDataModule",
    "ImageNetDataModule",
    "ImageNetteDataModule",
    "ImageWoofDataModule",
    "MNISTDataModule",
    "MNISTSample",
    "RoundSampler",
    "Splits",
]
