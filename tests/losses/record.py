"""The first 30 losses of twelve recipes: what a change that claims to change nothing must leave as it is.

    python tests/losses/record.py              # write the losses of this processor family to tests/losses/<recipe>.json
    python tests/losses/record.py --to FOLDER  # write them elsewhere: equal files mean equal to the last bit

tests/test_losses.py compares. Write them again only for a change that means to change the training, and say why in the
commit.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
STEPS = 30
ALL = [
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "trainer.log_every_n_steps=1",
    "trainer.max_epochs=2",
    "trainer.limit_train_batches=15",
    "trainer.limit_val_batches=1",
    "launch.threads=1",
    "compression.receipt=none",
    "callbacks.checkpoint.monitor=null",
    "data.batch_size=32",
    "test=false",
    "name=losses",
]
MLP = ["model=mlp", "model.net.width=32"]
RESNET = ["model=resnet20", "model.net.width=8", "model.net.depth=8"]
TWO = ["trainer.devices=2"]
RECIPES = {
    "mlp": MLP,
    "resnet": [*RESNET, "data.augment.mixup=0.4"],
    "vit": ["model=vit_tiny", "optimizer=adamw"],
    "gpt": ["model=gpt_nano", "data=synthetic_tokens", "optimizer=adamw"],
    "muon_ema": [*MLP, "optimizer=muon", "callbacks=[default,ema]"],
    "bf16": [*RESNET, "precision=bf16-mixed"],
    "prune": [*MLP, "compression=prune"],
    "rigl": [*MLP, "compression=rigl"],
    "prune_channels": [*RESNET, "compression=prune_channels"],
    "qat": [*RESNET, "compression=qat"],
    "ddp": [*MLP, "strategy=ddp", *TWO, "trainer.accumulate_grad_batches=2", "trainer.limit_train_batches=30"],
    "fsdp": [*MLP, "strategy=fsdp", *TWO, "trainer.gradient_clip_val=0.5"],
}


def family() -> str:
    """Return the instructions that torch's and oneDNN's kernels use here; other ones round otherwise."""
    matrices = "_AMX" if torch.cpu._is_amx_tile_supported() else ""  # for bfloat16 and integers
    return torch.backends.cpu.get_cpu_capability() + matrices


def losses(recipe: str, root: Path = ROOT) -> list[float]:
    """Train `recipe` with the sources of `root`; return the loss of each optimizer step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", *ALL, *RECIPES[recipe], f"paths.log_dir={folder}"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{recipe}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        return read(Path(folder))


def read(log_dir: Path) -> list[float]:
    """Return the loss of each step of the run in a folder."""
    (table,) = log_dir.glob("losses/2*/metrics.csv")
    header, *rows = (line.split(",") for line in table.read_text().splitlines())
    column = header.index("train/loss")
    return [float(row[column]) for row in rows if row[column]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=HERE, help="the folder (default: this one)")
    parser.add_argument("recipes", nargs="*", help="default: all")
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    for recipe in options.recipes or RECIPES:
        file = options.to / f"{recipe}.json"
        recorded = json.loads(file.read_text()) if file.exists() else {}
        recorded[family()] = losses(recipe)
        file.write_text(json.dumps(recorded, indent=1) + "\n")
        print(f"{recipe}: {len(recorded[family()])} losses, {recorded[family()][0]} to {recorded[family()][-1]}")


if __name__ == "__main__":
    main()
