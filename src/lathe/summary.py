"""The short table at the end of a run."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def show(result: dict[str, Any], run_dir: Path, console: Console | None = None) -> None:
    """Prints the final figures, where the run lies, and three commands to try next."""
    console = console or Console()
    table = Table(title="Run complete", show_header=False, title_justify="left")
    for name in sorted(key for key in result if key.startswith("test/")) or sorted(
        key for key in result if key.startswith("val/")
    ):
        table.add_row(name, f"{result[name]:.4f}")
    for name in sorted(key for key in result if "/" in key and key.split("/")[0] not in ("train", "val", "test")):
        table.add_row(name, f"{result[name]:.4f}")  # what compression reports
    table.add_row("parameters", f"{result['parameters']:,}")
    if result.get("samples_per_s"):
        table.add_row("samples/s", f"{result['samples_per_s']:,.0f}")
    table.add_row("seconds", f"{result['seconds']:.1f}")
    try:
        shown = run_dir.relative_to(Path.cwd())
    except ValueError:
        shown = run_dir
    table.add_row("run directory", str(shown))
    console.print(table)
    console.print("Next:")
    for command in (
        f"python scripts/evaluate.py run={shown} split=val",
        "python train.py model=resnet56 optimizer.lr=0.05",
        "python train.py -m model=mlp,resnet20 seed=1,2",
    ):
        console.print(f"  {command}", soft_wrap=True, highlight=False)
