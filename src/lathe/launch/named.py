"""Keys of a job on a run directory that others fill in."""

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lathe.config.words import key_of
from lathe.errors import require
from lathe.launch.continued import typed_words


def name_export(cfg: DictConfig) -> None:
    """Fills in `export` with the name that `target=` chose: a group, of which the choice's name alone counts where a
    run is used.

    Raises:
        UserError: `export` itself was typed, which would be ignored.
    """
    require(
        cfg.get("export") is None,
        f"export={cfg.get('export')} is filled in from target=: write target={cfg.get('export')}.",
    )
    cfg.export = HydraConfig.get().runtime.choices.get("target")
    require(bool(cfg.export), "target: expected one choice here, such as target=onnx, and no list.")


def name_checkpoint(cfg: DictConfig) -> None:
    """Where `run` is a checkpoint in its run directory, they are taken apart.

    Raises:
        UserError: `checkpoint` was typed too, and is another.
    """
    path = Path("" if OmegaConf.is_missing(cfg, "run") else str(cfg.run))
    home = next((above.parent for above in path.parents if above.name == "checkpoints"), None)
    if path.suffix != ".ckpt" or home is None or not (home / "config.yaml").is_file():
        return
    name = str(path.relative_to(home / "checkpoints").with_suffix(""))  # own/... of a ModelCheckpoint of the user's
    chosen = any(key_of(word) == "checkpoint" for word in typed_words()) and cfg.get("checkpoint") != name
    require("checkpoint" in cfg, f"run={path}: this takes a run as it is, not one of its checkpoints: run={home}.")
    require(not chosen, f"run={path} is a checkpoint, and checkpoint={cfg.get('checkpoint')} another: leave that out.")
    cfg.run, cfg.checkpoint = str(home), name
