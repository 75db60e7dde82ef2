"""Runs an export in a separate process without the net: `python -m lathe.export.probe <job folder>`.

The folder holds job.json, `{"folder": <of the export>, "threads": <number or null>}`, and in_0.npy, in_1.npy, ...;
out_0.npy, ... are written next to them.
"""

import json
import sys
from pathlib import Path

import numpy as np

from lathe.errors import UserError
from lathe.export.bundle import open_bundle


def main(job: Path) -> None:
    """Compute the outputs of a job's inputs."""
    wanted = json.loads((job / "job.json").read_text())
    bundle = open_bundle(wanted["folder"], wanted["threads"])
    for number in range(len(list(job.glob("in_*.npy")))):
        np.save(job / f"out_{number}.npy", np.asarray(bundle.run(np.load(job / f"in_{number}.npy"))))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except UserError as error:
        sys.exit(str(error))
