"""Writes a data set as shards that can be streamed: python scripts/make_shards.py data=cifar10 output=cifar10_shards"""

import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from lathe.config.resolve import resolve
from lathe.launch.command_checks import check_command
from lathe.launch.error_reporting import raise_on_signal, report_error, report_errors


@report_errors
@hydra.main(version_base="1.3", config_path="../configs", config_name="make_shards")
def main(cfg: DictConfig) -> None:
    try:
        settings = resolve(cfg)
        check_command(cfg, settings)
        from lathe.verbs.make_shards import make_shards  # imported late, since it imports torch

        with raise_on_signal():
            tell_of(*make_shards(settings))
    except Exception as error:
        sys.exit(report_error(error))  # caught here, as Hydra would print a line first


def tell_of(folder: Path, index: dict[str, Any]) -> None:
    """Print what was written, and the command to train on it."""
    train, (channels, *sides) = index["splits"]["train"], index["image"]
    size = sum(shard["bytes"] for split in index["splits"].values() for shard in split["shards"])
    counts = {name: sum(shard["samples"] for shard in split["shards"]) for name, split in index["splits"].items()}
    print(f"{folder}: {counts} images, {size / 1e6:.1f} MB, {len(train['shards'])} training shards")
    facts = f"data.num_classes={index['num_classes']} data.channels={channels} data.image_size={max(sides)}"
    scale = "".join(f" 'data.{key}={index[key]}'" for key in ("mean", "std") if key in index)
    print(f"python train.py data=shards data.source.name={folder.absolute()} {facts}{scale}")


if __name__ == "__main__":
    main()
