"""Run a weights-only file in the run's net: `python -m lathe.verbs.export.reload <job folder>`.

As `lathe.export.probe`, with the run directory as `"run"` in job.json.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from lathe import export
from lathe.errors import UserError
from lathe.export import manifest as manifests
from lathe.runs.build import make_task
from lathe.runs.rundir import open_run


def main(job: Path) -> None:
    """Compute the outputs of a job."""
    wanted = json.loads((job / "job.json").read_text())
    folder = Path(wanted["folder"])
    manifest = manifests.read(folder)
    net = make_task(open_run(wanted["run"], "run").config, train=False).net
    export.get(str(manifest["target"])).restore(net, folder / manifest["file"])  # type: ignore[attr-defined]  # a weights-only target
    net.eval()
    for number in range(len(list(job.glob("in_*.npy")))):
        with torch.no_grad():
            np.save(job / f"out_{number}.npy", net(torch.from_numpy(np.load(job / f"in_{number}.npy"))).numpy())


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except UserError as error:
        sys.exit(str(error))
