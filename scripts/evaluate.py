"""Evaluates a run from its directory alone: python scripts/evaluate.py run=logs/latest split=test"""

import hydra
from omegaconf import DictConfig

from lathe.launch import launch_on_run, report_errors


@report_errors
@hydra.main(version_base="1.3", config_path="../configs", config_name="evaluate")
def main(cfg: DictConfig) -> None:
    launch_on_run(cfg, "lathe.verbs.evaluate:evaluate")


if __name__ == "__main__":
    main()
