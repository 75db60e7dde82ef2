"""Measures a finished run beside the dense net: python scripts/receipt.py run=logs/latest baseline=<run directory>"""

import hydra
from omegaconf import DictConfig

from lathe.launch import launch_on_run, report_errors


@report_errors
@hydra.main(version_base="1.3", config_path="../configs", config_name="receipt")
def main(cfg: DictConfig) -> None:
    launch_on_run(cfg, "lathe.receipt.measured:receipt")


if __name__ == "__main__":
    main()
