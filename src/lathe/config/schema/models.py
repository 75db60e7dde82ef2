"""Tasks and nets."""

from lathe.config.schema.rule import Rule, flag, group, items, node, number, path, text, whole, word

_depth, _width = whole(1, 100_000), whole(1, 2**20)
_dropout = number(0, below=1)
_classes = whole(1, 2**24)
INIT = text("an initialisation") | items(text("an initialisation"), 1) | None
PRETRAINED: dict[str, Rule] = {
    "name": text("a name that timm lists", r"[\w.]+"),
    "pretrained": path | flag | None,
    "sha256": text("a SHA-256 in hexadecimal", r"[0-9a-fA-F]{64}") | None,
}
_loss = node | group(node) | None
_metric = text("a metric's name") | node
_metrics = items(_metric) | group(_metric) | None
_flat: dict[str, Rule] = {
    "width": _width,
    "depth": _depth,
    "dropout": _dropout,
    "channels": whole(1, 65536),
    "image_size": whole(1, 65536),
    "num_classes": _classes,
}
_convolutions: dict[str, Rule] = {
    "depth": _depth,
    "width": _width,
    "in_channels": whole(1, 65536),
    "num_classes": _classes,
}

MODELS: dict[str, dict[str, Rule]] = {
    "lathe.tasks.ClassificationTask": {
        "net": node,
        "label_smoothing": number(0, below=1),
        "init": INIT,
        "loss": _loss,
        "class_weights": items(number(0), 1) | None,
        "metrics": _metrics,
    },
    "lathe.tasks.RegressionTask": {"net": node, "init": INIT, "loss": _loss, "metrics": _metrics},
    "lathe.tasks.MultiLabelTask": {
        "net": node,
        "init": INIT,
        "loss": _loss,
        "pos_weight": items(number(0), 1) | None,
        "metrics": _metrics,
    },
    "lathe.tasks.Weighted": {"weight": number(), "loss": node},
    "lathe.tasks.LanguageModellingTask": {"net": node, "init": INIT},
    "lathe.tasks.LightningTask": {"net": node},
    "lathe.nets.MLP": _flat,
    "lathe.nets.DeepMLP": _flat,
    "lathe.nets.ViT": {
        **_flat,
        "patch_size": whole(1, 65536),
        "heads": whole(1, 65536),
        "pool": word("mean", "token"),
    },
    "lathe.nets.GPT": {
        "width": _width,
        "depth": _depth,
        "heads": whole(1, 65536),
        "dropout": _dropout,
        "tie_weights": flag,
        "vocab_size": whole(1, 2**32),
        "max_length": whole(1, 2**24),
    },
    "lathe.nets.Airbench": {
        "width": _width,
        "growth": whole(1, 1024),
        "in_channels": whole(1, 65536),
        "image_size": whole(2, 65536),
        "num_classes": _classes,
        "views": whole(1, 2, also=[6]),
    },
    "lathe.nets.CifarResNet": {
        **_convolutions,
        "depth": whole(8, 100_000),
        "shortcut": word("projection", "zero_pad"),
        "stem": _width | None,
    },
    "lathe.nets.ResNet": {**_convolutions, "stem": word("cifar", "imagenet")},
    "lathe.nets.timm_net": {
        "name": text("a name that timm lists", r"[\w.]+"),
        "in_channels": whole(1, 65536),
        "num_classes": _classes,
        "image_size": whole(1, 65536) | None,
        "patch_size": whole(1, 65536) | None,
        "drop_rate": number(0, below=1) | None,
        "drop_path_rate": number(0, below=1) | None,
        "global_pool": text("a pooling that timm knows") | None,
    },
    "lathe.nets.WideResNet": {**_convolutions, "depth": whole(10, 100_000), "dropout": _dropout},
}
