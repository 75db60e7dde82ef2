"""Runs side by side: python scripts/report.py runs=logs/<name>"""

import hydra
from omegaconf import DictConfig

from lathe.launch import report_errors, run_inline


@report_errors
@hydra.main(version_base="1.3", config_path="../configs", config_name="report")
def main(cfg: DictConfig) -> None:
    run_inline(cfg, "lathe.verbs.report:report")


if __name__ == "__main__":
    main()
