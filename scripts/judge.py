"""Judges a change by runs with equal seeds: python scripts/judge.py baseline='model=mlp' candidate='model=resnet20'"""

import hydra
from omegaconf import DictConfig

from lathe.launch import report_errors, run_inline


@report_errors
@hydra.main(version_base="1.3", config_path="../configs", config_name="judge")
def main(cfg: DictConfig) -> None:
    run_inline(cfg, "lathe.verbs.judge:judge")


if __name__ == "__main__":
    main()
