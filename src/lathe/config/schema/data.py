"""Data sets, their sources and augmentation."""

from lathe.config.schema.rule import Rule, anything, count, flag, items, node, number, path, share, text, whole, word

_seed = whole(0, 2**32 - 1)
_side = whole(1, 65536)
_size = whole(1, 2**31)
_batch = whole(1, 2**31)
_ids = whole(2, 2**32)
_length = whole(1, 2**24)
_loading: dict[str, Rule] = {
    "batch_size": _batch,
    "eval_batch_size": _batch | None,
    "seed": _seed,
}
_reading: dict[str, Rule] = {
    "num_workers": whole(0, 65536) | "auto",
    "pin_memory": flag,
    "prefetch_factor": whole(1, 4096) | None,
    "persistent_workers": flag,
}
_images: dict[str, Rule] = {
    "source": node,
    "num_classes": whole(1, 2**24),
    "class_names": items(text()) | None,
    "channels": whole(1, 65536),
    "image_size": _side,
    "mean": items(number(), 1),
    "std": items(number(above=0), 1),
    **_loading,
    "augment": node | items(node) | None,
    "loader": word("resident", "workers"),
    **_reading,
}
_folds: dict[str, Rule] = {
    "folds": whole(2, 2**20) | None,
    "fold": whole(0, 2**20) | None,
    "share": number(above=0, high=1),
}
_files: dict[str, Rule] = {"data_dir": path, "name": path, "verify": flag}
_sizes: dict[str, Rule] = {"train_size": _size, "val_size": _size, "test_size": _size}

DATA: dict[str, dict[str, Rule]] = {
    "lathe.data.ImageDataModule": {
        **_images,
        **_folds,
        "normalize": word("batch", "folded"),
        "folder": path | None,
    },
    "lathe.data.ShardDataModule": {**_images, "window": whole(1, 2**20)},
    "lathe.data.TokenDataModule": {"source": node, "vocab_size": _ids, "length": _length, **_loading},
    "lathe.data.DocumentDataModule": {
        "source": node,
        "vocab_size": _ids,
        "length": _length,
        "long": word("refuse", "split", "cut"),
        "max_tokens": _size,
        "max_batch_size": _batch,
        **_loading,
        "batch_size": _batch | None,
        "bucket_growth": number(1) | None,
        "pad_multiple": _length,
        "row_multiple": _batch,
    },
    "lathe.data.DatasetDataModule": {
        "train": node,
        "val": node | None,
        "test": node | None,
        "input": text() | None,
        "target": text() | None,
        "transform": node | None,
        "eval_transform": node | None,
        "collate_fn": node | None,
        "val_share": number(above=0, below=1),
        "test_share": number(above=0, below=1),
        "split_seed": _seed,
        "num_classes": whole(1, 2**24) | None,
        "class_names": items(text()) | None,
        "channels": whole(1, 65536) | None,
        "image_size": _side | None,
        "mean": items(number(), 1) | None,
        "std": items(number(above=0), 1) | None,
        "samples": _size | None,
        **_loading,
        **_folds,
        **_reading,
    },
    "lathe.data.Augment": {
        "crop": whole(0, 65536),
        "crop_fill": word("zero", "reflect"),
        "flip": word("none", "random", "alternating"),
        "cutout": whole(0, 65536),
        "mixup": number(0),
        "cutmix": number(0),
    },
    "lathe.data.RandomCrop": {"padding": whole(1, 65536), "fill": word("zero", "reflect")},
    "lathe.data.RandomFlip": {"how": word("random", "alternating")},
    "lathe.data.Cutout": {"size": whole(1, 65536)},
    "lathe.data.RandomResizedCrop": {
        "scale": items(number(above=0, high=1), 2, 2),
        "ratio": items(number(above=0), 2, 2),
    },
    "lathe.data.ColorJitter": {
        "brightness": number(0),
        "contrast": number(0),
        "saturation": number(0),
        "hue": number(0, 0.5),
    },
    "lathe.data.RandAugment": {
        "num_ops": whole(1, 64),
        "magnitude": whole(0, 4095),
        "num_bins": whole(2, 4096),
    },
    "lathe.data.TrivialAugmentWide": {"num_bins": whole(2, 4096)},
    "lathe.data.RandomErasing": {
        "p": share,
        "scale": items(number(above=0, high=1), 2, 2),
        "ratio": items(number(above=0), 2, 2),
        "fill": word("mean", "zero", "random"),
    },
    "lathe.data.Mixup": {"alpha": number(above=0)},
    "lathe.data.CutMix": {"alpha": number(above=0)},
    "lathe.data.Digits": {"image_size": whole(8, 65536), "val_size": _size, "test_size": _size, "split_seed": _seed},
    "lathe.data.Cifar": {
        "name": word("cifar10", "cifar100"),
        "data_dir": path,
        "download": flag,
        "val_size": _size,
        "split_seed": _seed,
        "archives": items() | None,
        "base_url": text("an address", r"(https?|file)://\S+"),
    },
    "lathe.data.FashionMnist": {
        "data_dir": path,
        "folder": path | None,
        "download": flag,
        "val_size": _size,
        "split_seed": _seed,
        "files": anything,
        "base_url": text("an address", r"(https?|file)://\S+"),
    },
    "lathe.data.ImageFolder": {
        "folder": path,
        "data_dir": path,
        "classes": items(text(), 1) | None,
        "train": path | None,
        "val": path | None,
        "test": path | None,
        "channels": whole(1, 1) | whole(3, 3),
        "image_size": _side,
        "resize": word("crop", "squash"),
        "val_share": number(above=0, below=1),
        "test_share": number(above=0, below=1),
        "split_seed": _seed,
        "skip_bad": whole(0, 2**31),
    },
    "lathe.data.Shards": {**_files, "max_open": whole(1, 2**20)},
    "lathe.data.TokenFiles": _files,
    "lathe.data.Synthetic": {
        "num_classes": whole(2, 2**31),
        "channels": whole(1, 65536),
        "image_size": whole(4, 65536),
        **_sizes,
        "noise": share,
        "difficulty": share,
        "seed": _seed,
    },
    "lathe.data.SyntheticTokens": {
        "vocab_size": _ids,
        "length": _length,
        **_sizes,
        "noise": share,
        "lag": count,
        "seed": _seed,
    },
    "lathe.data.SyntheticDocuments": {
        "vocab_size": whole(3, 2**32),
        "shortest": _length,
        "longest": whole(2, 2**24),
        **_sizes,
        "noise": share,
        "lag": count,
        "seed": _seed,
    },
}
