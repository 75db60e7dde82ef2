"""What of Lathe works on this machine's GPU, in about five minutes: python scripts/gpu_check.py"""

import hydra
from omegaconf import DictConfig

from lathe.launch import report_errors, run_inline


@report_errors
@hydra.main(version_base="1.3", config_path="../configs", config_name="gpu_check")
def main(cfg: DictConfig) -> None:
    run_inline(cfg, "lathe.verbs.gpu_check:gpu_check")


if __name__ == "__main__":
    main()
