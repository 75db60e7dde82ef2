"""Lists, compares and tidies the runs below logs: python scripts/runs.py where=[state=complete,optimizer.lr=0.1]"""

import hydra
from omegaconf import DictConfig

from lathe.launch import report_errors, run_inline


@report_errors
@hydra.main(version_base="1.3", config_path="../configs", config_name="runs")
def main(cfg: DictConfig) -> None:
    run_inline(cfg, "lathe.verbs.runs.command:runs")


if __name__ == "__main__":
    main()
