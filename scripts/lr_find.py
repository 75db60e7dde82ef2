"""Which learning rate to start from: python scripts/lr_find.py model=resnet20 optimizer=adamw"""

import hydra
from omegaconf import DictConfig

from lathe.launch import launch_dry_run, report_errors


@report_errors
@hydra.main(version_base="1.3", config_path="../configs", config_name="lr_find")
def main(cfg: DictConfig) -> None:
    launch_dry_run(cfg, "lathe.verbs.lr_find:lr_find")


if __name__ == "__main__":
    main()
