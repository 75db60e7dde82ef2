"""Writes a data set as shards that can be streamed: python scripts/make_shards.py data=cifar10 output=cifar10_shards"""

import hydra
from omegaconf import DictConfig

from lathe.launch import report_errors, run_inline


@report_errors
@hydra.main(version_base="1.3", config_path="../configs", config_name="make_shards")
def main(cfg: DictConfig) -> None:
    run_inline(cfg, "lathe.verbs.make_shards:report")


if __name__ == "__main__":
    main()
