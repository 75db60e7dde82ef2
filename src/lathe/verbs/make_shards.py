"""Write a data set as shards that can be streamed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lathe.data.checks import squashed, using
from lathe.data.shards import FolderSamples, Sample, index_tars, write_shards
from lathe.data.splits import Split, load_splits
from lathe.errors import require, under
from lathe.runs.instantiate import instantiate


def report(settings: dict[str, Any]) -> None:
    """Run `make_shards`, and print what was written and the command that trains on it."""
    folder, index = make_shards(settings)
    train, (channels, *sides) = index["splits"]["train"], index["image"]
    size = sum(shard["bytes"] for split in index["splits"].values() for shard in split["shards"])
    counts = {name: sum(shard["samples"] for shard in split["shards"]) for name, split in index["splits"].items()}
    print(f"{folder}: {counts} images, {size / 1e6:.1f} MB, {len(train['shards'])} training shards")
    facts = f"data.num_classes={index['num_classes']} data.channels={channels} data.image_size={max(sides)}"
    scale = "".join(f" 'data.{key}={index[key]}'" for key in ("mean", "std") if key in index)
    print(f"python train.py data=shards data.source.name={folder.absolute()} {facts}{scale}")


def make_shards(settings: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Write or index shards as `settings` requests, and return the folder and the index."""
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
        source = instantiate(settings["data"]["source"], "data.source")
        with using(source, "prepared"):
            source.prepare()
        splits = {name: _samples(split) for name, split in vars(load_splits(source)).items()}
        names = settings["data"].get("class_names")
    folder = Path(settings["paths"]["data_dir"]) / settings["output"]
    written = {key: settings[key] for key in ("shard_size", "encoding", "overwrite")}
    return folder, write_shards(folder, splits, source.num_classes, class_names=names, **written)


def _samples(split: Split) -> Iterator[Sample]:
    for row in split.rows:
        yield split.images[row], int(split.labels[row])
