"""Data: sources of images, batched augmentation, loaders that are exact under any number of devices, and the data module."""

from lathe.data.augment import Augment
from lathe.data.cifar import Cifar
from lathe.data.digits import Digits
from lathe.data.loader import ResidentLoader
from lathe.data.module import ImageDataModule
from lathe.data.normalize import Normalizer
from lathe.data.splits import Source, Split, Splits
from lathe.data.stream import StreamLoader
from lathe.data.synthetic import Synthetic

__all__ = [
    "Augment",
    "Cifar",
    "Digits",
    "ImageDataModule",
    "Normalizer",
    "ResidentLoader",
    "Source",
    "Split",
    "Splits",
    "StreamLoader",
    "Synthetic",
]
