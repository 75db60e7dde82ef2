"""Makes memory-mapped token files from a folder of text: python scripts/prepare_tokens.py input=books output=books"""

import hydra
from omegaconf import DictConfig

from lathe.launch import report_errors, run_inline


@report_errors
@hydra.main(version_base="1.3", config_path="../configs", config_name="prepare_tokens")
def main(cfg: DictConfig) -> None:
    run_inline(cfg, "lathe.data.token_file:report")


if __name__ == "__main__":
    main()
