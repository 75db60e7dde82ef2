"""Makes a finished run once more and compares: python scripts/reproduce.py run=logs/latest"""

import hydra
from omegaconf import DictConfig

from lathe.launch import report_errors, run_inline


@report_errors
@hydra.main(version_base="1.3", config_path="../configs", config_name="reproduce")
def main(cfg: DictConfig) -> None:
    run_inline(cfg, "lathe.verbs.reproduce:reproduce")


if __name__ == "__main__":
    main()
