"""Run an export in a separate process: `python -m lathe.verbs.export_probe <job folder>`.

The folder holds job.json, `{"folder": <of the export>, "run": <run directory>, "threads": <number or null>}`, and
in_0.npz, in_1.npz, ... with the arrays of each call in order; out_0.npz, ... are written next to them. Only a file of
weights needs the run, whose net it is loaded into.
"""

import json
import sys
from pathlib import Path

import numpy as np

from lathe import export
from lathe.errors import UserError
from lathe.export.bundle import open_bundle, read_manifest
from lathe.export.inputs import FlatCore, as_list
from lathe.measure.calls import Call


def main(job: Path) -> None:
    """Compute the outputs of a job's inputs."""
    wanted = json.loads((job / "job.json").read_text())
    folder = Path(wanted["folder"])
    manifest = read_manifest(folder)
    target = export.get(manifest["target"])
    if target.computes:
        run = open_bundle(folder, wanted["threads"]).run
    else:  # the run's net with the weights of the file
        from lathe.export.torch_runner import on_arrays
        from lathe.runs.build import make_task
        from lathe.runs.rundir import open_run
        from lathe.tasks.core import EXAMPLE

        task = make_task(open_run(wanted["run"], "run").config, train=False)
        net = target.restore(task.core, folder / manifest["file"]).eval()
        if task.net is task.driven:  # a user's LightningModule
            call = Call.load(Path(wanted["run"], EXAMPLE))
            net = FlatCore(net, call.args, call.kwargs)
        run = on_arrays(net)
    for number in range(len(list(job.glob("in_*.npz")))):
        with np.load(job / f"in_{number}.npz") as arrays:
            np.savez(job / f"out_{number}.npz", *as_list(run(*arrays.values())))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except UserError as error:
        sys.exit(str(error))
