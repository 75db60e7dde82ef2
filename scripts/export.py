"""Exports a finished run to a runtime's file, with proof: python scripts/export.py run=logs/latest target=onnx"""

import hydra
from omegaconf import DictConfig

from lathe.launch import launch_on_run, report_errors


@report_errors
@hydra.main(version_base="1.3", config_path="../configs", config_name="export")
def main(cfg: DictConfig) -> None:
    launch_on_run(cfg, "lathe.verbs.export:ship")


if __name__ == "__main__":
    main()
