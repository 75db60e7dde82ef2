"""Writes a data set as shards that can be streamed: python scripts/make_shards.py data=cifar10 output=cifar10_shards"""

import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from lathe.config.composed import resolve
from lathe.launch.start import check_typed
from lathe.launch.stops import stoppable
from lathe.launch.telling import one_sentence, tell


@one_sentence
@hydra.main(version_base="1.3", config_path="../configs", config_name="make_shards")
def main(cfg: DictConfig) -> None:
    try:
        settings = resolve(cfg)
        check_typed(cfg, settings)
        from lathe.verbs.make_shards import make_shards  # here: it imports torch

        with stoppable():
            tell_of(*make_shards(settings))
    except Exception as error:
        sys.exit(tell(error))  # here: Hydra would print a line of its own first


def tell_of(folder: Path, index: dict[str, Any]) -> None:
    """Prints what was written, and how to train on it."""
    train, (channels, *sides) = index["splits"]["train"], index["image"]
    size = sum(shard["bytes"] for split in index["splits"].values() for shard in split["shards"])
    counts = {name: sum(shard["samples"] for shard in split["shards"]) for name, split in index["splits"].items()}
    print(f"{folder}: {counts} images, {size / 1e6:.1f} MB, {len(train['shards'])} training shards")
    facts = f"data.num_classes={index['num_classes']} data.channels={channels} data.image_size={max(sides)}"
    scale = "".join(f" 'data.{key}={index[key]}'" for key in ("mean", "std") if key in index)
    print(f"python train.py data=shards data.source.name={folder.absolute()} {facts}{scale}")


if __name__ == "__main__":
    main()
