"""How much each layer of a run may be pruned or quantized: python scripts/sensitivity.py run=logs/latest budget=0.15"""

import hydra
from omegaconf import DictConfig

from lathe.launch import launch_on_run, report_errors


@report_errors
@hydra.main(version_base="1.3", config_path="../configs", config_name="sensitivity")
def main(cfg: DictConfig) -> None:
    launch_on_run(cfg, "lathe.verbs.sensitivity:sensitivity")


if __name__ == "__main__":
    main()
