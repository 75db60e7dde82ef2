"""A table of the net's layers before training."""

from typing import Any

from lightning.pytorch.callbacks import RichModelSummary
from rich.console import Console
from rich.table import Table

SHOWN = ("Name", "Type", "Params", "In sizes", "Out sizes")


class ModelSummary(RichModelSummary):
    """Lightning's summary, short: names, types and parameters.

    Lightning also prints a column of FLOPs, which stays 0 unless the task carries an example input: a figure that nobody counted.
    """

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        columns = [(name, values) for name, values in summary_data if name in SHOWN]
        table = Table()
        for name, _ in columns:
            table.add_column(name, justify="right" if name == "Params" else "left")
        for row in zip(*(values for _, values in columns), strict=True):
            table.add_row(*row)
        console = Console()
        console.print(table)
        console.print(f"{total_parameters:,} parameters, {trainable_parameters:,} of them trainable")
