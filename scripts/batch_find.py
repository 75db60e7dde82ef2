"""The largest batch that fits into memory: python scripts/batch_find.py model=resnet20 find.memory=4"""

import hydra
from omegaconf import DictConfig

from lathe.launch import launch_dry_run, report_errors


@report_errors
@hydra.main(version_base="1.3", config_path="../configs", config_name="batch_find")
def main(cfg: DictConfig) -> None:
    launch_dry_run(cfg, "lathe.verbs.batch_find:batch_find", one_device=True)


if __name__ == "__main__":
    main()
