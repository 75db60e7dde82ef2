"""Writes a data set as shards that can be streamed: python scripts/make_shards.py data=cifar10 output=cifar10_shards"""

import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from lathe.config.composed import resolve
from lathe.errors import require, under
from lathe.launch.start import check_typed
from lathe.launch.telling import one_sentence, tell


@one_sentence
@hydra.main(version_base="1.3", config_path="../configs", config_name="make_shards")
def main(cfg: DictConfig) -> None:
    try:
        settings = resolve(cfg)
        check_typed(cfg, settings)
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


def make_shards(settings: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Writes or indexes what `settings` asks for; returns the folder and the index.

    Raises:
        UserError: two things are asked for, or what writing and indexing raise.
    """
    # imports torch: only once the command line is known to be right
    from lathe.data.checks import squashed
    from lathe.data.shard_write import FolderSamples, index_tars, source_samples, write_shards
    from lathe.runs.build import make

    images, tars = settings["images"], settings["tars"]
    both = images["folder"] is not None and tars["folder"] is not None
    require(not both, f"images.folder={images['folder']} and tars.folder={tars['folder']} are both set: choose one.")
    if tars["folder"] is not None:
        classes = tars["num_classes"]
        require(isinstance(classes, int), f"tars.num_classes={classes}: say how many classes {tars['folder']} has.")
        return Path(tars["folder"]), index_tars(Path(tars["folder"]), classes)
    source: Any
    if images["folder"] is not None:
        with under("images"):
            source = FolderSamples(**images)
        names = source.classes
        splits = {name: source.samples(name) for name in ("train", "val", "test")}
    else:
        known = "num_classes" in settings["data"]
        require(known, "data: only image data sets are written as shards; token files are streamed as they are.")
        require(
            not squashed(settings["data"]),
            "data.source.resize=squash: shards keep pixels and not how they were scaled, which predict.py and the "
            "server have to know: leave it out, or train on data=image_folder.",
        )
        source = make(settings["data"]["source"], "data.source")
        splits, names = source_samples(source), settings["data"].get("class_names")
    folder = Path(settings["paths"]["data_dir"]) / settings["output"]
    written = {key: settings[key] for key in ("shard_size", "encoding", "overwrite")}
    return folder, write_shards(folder, splits, source.num_classes, class_names=names, **written)


if __name__ == "__main__":
    main()
