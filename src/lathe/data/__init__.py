"""Data: sources of images, batched augmentation, loaders that are exact under any number of devices, and the data
module.
"""

from typing import TYPE_CHECKING

from lathe.config.lazy_imports import lazy_getattr
from lathe.data.augment import Augment
from lathe.data.cifar import Cifar
from lathe.data.digits import Digits
from lathe.data.loader import ResidentLoader
from lathe.data.module import ImageDataModule
from lathe.data.normalize import Normalizer
from lathe.data.splits import Source, Split, Splits
from lathe.data.stream import StreamLoader
from lathe.data.synthetic import Synthetic
from lathe.data.transforms.base import Transform
from lathe.data.transforms.fields import CutMix, Cutout, Mixup, RandomCrop, RandomFlip

if TYPE_CHECKING:
    from lathe.data.dataset import DatasetDataModule
    from lathe.data.documents import DocumentDataModule
    from lathe.data.fashion_mnist import FashionMnist
    from lathe.data.image_folder import ImageFolder
    from lathe.data.shards import ShardDataModule, Shards
    from lathe.data.synthetic_documents import SyntheticDocuments
    from lathe.data.synthetic_tokens import SyntheticTokens
    from lathe.data.token_file import TokenFiles
    from lathe.data.tokens import TokenDataModule
    from lathe.data.transforms.erasing import RandomErasing
    from lathe.data.transforms.jitter import ColorJitter
    from lathe.data.transforms.policies import RandAugment, TrivialAugmentWide
    from lathe.data.transforms.resized_crop import RandomResizedCrop
else:
    __getattr__ = lazy_getattr(
        __name__,
        {
            "DatasetDataModule": "dataset",
            "DocumentDataModule": "documents",
            "FashionMnist": "fashion_mnist",
            "ImageFolder": "image_folder",
            "ShardDataModule": "shards",
            "ColorJitter": "transforms.jitter",
            "RandAugment": "transforms.policies",
            "RandomErasing": "transforms.erasing",
            "RandomResizedCrop": "transforms.resized_crop",
            "TrivialAugmentWide": "transforms.policies",
            "Shards": "shards",
            "SyntheticDocuments": "synthetic_documents",
            "SyntheticTokens": "synthetic_tokens",
            "TokenFiles": "token_file",
            "TokenDataModule": "tokens",
        },
    )

__all__ = [
    "Augment",
    "Cifar",
    "ColorJitter",
    "CutMix",
    "Cutout",
    "DatasetDataModule",
    "Digits",
    "DocumentDataModule",
    "FashionMnist",
    "ImageDataModule",
    "ImageFolder",
    "Mixup",
    "Normalizer",
    "RandAugment",
    "RandomCrop",
    "RandomErasing",
    "RandomFlip",
    "RandomResizedCrop",
    "ResidentLoader",
    "ShardDataModule",
    "Shards",
    "Source",
    "Split",
    "Splits",
    "StreamLoader",
    "Synthetic",
    "SyntheticDocuments",
    "SyntheticTokens",
    "TokenDataModule",
    "TokenFiles",
    "Transform",
    "TrivialAugmentWide",
]
