"""What of Lathe works on this machine's GPU, in about five minutes: python scripts/gpu_check.py"""

import hydra
from omegaconf import DictConfig

from lathe.launch import launch_here, one_sentence


@one_sentence
@hydra.main(version_base="1.3", config_path="../configs", config_name="gpu_check")
def main(cfg: DictConfig) -> None:
    launch_here(cfg, "lathe.verbs.gpu_check:gpu_check")


if __name__ == "__main__":
    main()
