"""The receipt of a run of a user's LightningModule: its core, called with the inputs of example.pt."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lathe.config.metric_names import on_test, without_split
from lathe.errors import UserError, require
from lathe.export.inputs import FlatCore, as_list
from lathe.measure.calls import Call
from lathe.receipt.forms import Form, Input
from lathe.receipt.measured import Receipt
from lathe.runs.inference import open_data, open_run_net
from lathe.runs.rundir import RunDir
from lathe.tasks.core import EXAMPLE, record_calls


class CoreReceipt(Receipt):
    """Size and time are those of the core. Metrics are what the module's own steps have logged under the monitored
    name, from result.json of this run and of the dense one.
    """

    def open(self, cfg: dict[str, Any]) -> None:
        self.task, self.cfg = open_run_net(self.run.path, own=True)
        file = self.run.path / EXAMPLE
        if file.is_file():
            self.call = Call.load(file)
        else:
            self.call = record_calls(self.task, open_data(self.cfg, self.task).eval_loader("val"))[0]
        self.net = self._flat(self.task.core)
        task, self.notes = self._open_dense(self.baseline)
        try:
            # the submodule of the same name: that run may have named another core, or none
            dense = self._flat(task.net.get_submodule(self.task.core_name))
            self.dense: Any = SimpleNamespace(net=dense)
        except (AttributeError, RuntimeError, TypeError, ValueError, UserError) as error:  # of a core with other inputs
            raise UserError(f"baseline={self.baseline} takes other inputs than this run's core.") from error
        self.result = self.run.result if self.run.complete else {}
        given = (self.cfg["callbacks"].get("checkpoint") or {}).get("monitor")
        self.monitor = str(self.result.get("monitor") or given or "the last step, without callbacks.checkpoint.monitor")
        self.metric, self.undeclared = without_split(self.monitor), None
        self.split = "test" if self.cfg["test"] else "val"

    def _flat(self, core: nn.Module) -> nn.Module:
        """Return the core as a function of tensors; itself where it takes and returns one."""
        flat = FlatCore(core, self.call.args, self.call.kwargs)
        flat.find_batch()
        require(flat.has_batch, "model.core: it takes one batch size alone, and a receipt has several.")
        self.flat = flat
        with torch.no_grad():
            plain = isinstance(self.call.example, Tensor) and isinstance(core(flat.example[0].clone()), Tensor)
        return core.eval() if plain else flat

    def sample(self, n: int) -> Input:
        rows = self.flat.rows(self.flat.example, n)
        return rows if isinstance(self.net, FlatCore) else rows[0]

    def same_outputs(self) -> bool:
        mine, other = (as_list(net(*as_list(self.sample(1)))) for net in (self.net, self.dense.net))
        return [one.shape for one in mine] == [one.shape for one in other]

    def _metrics(self, forms: Iterable[Form]) -> list[dict[str, Any]]:
        dense = RunDir(self.baseline) if self.baseline is not None else None
        results = {"this": self.result, "dense": dense.result if dense is not None and dense.complete else {}}
        rows = []
        for of, result in results.items():
            for split, name in {"val": self.monitor, "test": on_test(self.monitor)}.items():
                if isinstance(result.get(name), float) and split in ("val", self.split):
                    where = {"of": of, "backend": "eager", "split": split}
                    rows.append({**where, "figures": {self.metric: result[name]}, "agreement": None})
        self.left_out.append(
            {
                "form": "metrics of the files, and equal predictions",
                "reason": "they need the module's own steps: scripts/export.py compares files and their metric",
            }
        )
        if not any(row["split"] == self.split for row in rows):
            name = on_test(self.monitor) if self.split == "test" else self.monitor
            self.left_out.append({"form": f"{self.split}/{self.metric}", "reason": f"result.json has no {name}"})
        return rows
