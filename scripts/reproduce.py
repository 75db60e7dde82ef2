"""Makes a finished run once more and compares: python scripts/reproduce.py run=logs/latest"""

import hydra
from omegaconf import DictConfig

from lathe.launch import launch_here, one_sentence


@one_sentence
@hydra.main(version_base="1.3", config_path="../configs", config_name="reproduce")
def main(cfg: DictConfig) -> None:
    launch_here(cfg, "lathe.verbs.reproduce.command:reproduce")


if __name__ == "__main__":
    main()
