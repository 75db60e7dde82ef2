"""A table of the layers that have parameters, printed before training."""

from typing import Annotated, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichModelSummary
from lightning.pytorch.utilities.model_summary import ModelSummary as Summary
from lightning.pytorch.utilities.model_summary import summarize
from pydantic import Field
from rich.console import Console
from rich.table import Table

from lathe.config.validation import validated

SHOWN = ("Name", "Type", "Params", "In sizes", "Out sizes")


class ModelSummary(RichModelSummary):
    """Lightning's summary with names, types and parameter counts of the modules that have parameters.

    Lightning's FLOPs column is 0 unless the task has an example input. Once a strategy has sharded the net, rank 0
    would count its own shard.
    """

    @validated
    def __init__(self, max_depth: Annotated[int, Field(ge=-1)] = 1, **options: Any) -> None:
        super().__init__(max_depth, **options)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            super().on_fit_start(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do nothing: `setup` prints the table."""

    def _summary(self, trainer: Trainer, pl_module: LightningModule) -> Summary:
        return summarize(
            pl_module, max_depth=self._max_depth
        )  # an unsharded net needs no summary for DeepSpeed's partitions

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
        columns = {name: values for name, values in summary_data if name in SHOWN}
        table = Table()
        for name in columns:
            table.add_column(name, justify="right" if name == "Params" else "left")
        for *row, count in zip(*columns.values(), columns["Params"], strict=True):
            if count.strip() != "0":
                table.add_row(*row)
        console = Console()
        console.print(table)
        console.print(f"{total_parameters:,} parameters, {trainable_parameters:,} of them trainable")
