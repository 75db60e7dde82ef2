"""The main job: trains a model. `python train.py --help` lists the choices."""

import hydra
from omegaconf import DictConfig

from lathe.launch import launch, report_errors


@report_errors
@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(cfg: DictConfig) -> float | None:
    return launch(cfg, "lathe.training.train:train")


if __name__ == "__main__":
    main()
