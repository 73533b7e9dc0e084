"""Data sets as LightningDataModules: one file each."""

from __future__ import annotations

from leakwatch.datamodules.arrays import ArrayDataModule
from leakwatch.datamodules.base import ImageDataModule, Splits
from leakwatch.datamodules.cifar10 import CIFAR10DataModule
from leakwatch.datamodules.dataset import ImageArrays, ImageDataset
from leakwatch.datamodules.fashion_mnist import FashionMNISTDataModule
from leakwatch.datamodules.mnist import MNISTDataModule
from leakwatch.datamodules.mnist_sample import MNISTSample

__all__ = [
    "ArrayDataModule",
    "CIFAR10DataModule",
    "FashionMNISTDataModule",
    "ImageArrays",
    "ImageDataModule",
    "ImageDataset",
    "MNISTDataModule",
    "MNISTSample",
    "Splits",
]
