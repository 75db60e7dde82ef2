"""Predicts classes of images with a run: python scripts/predict.py run=logs/latest input=images.npy
output=predictions.csv
"""

import hydra
from omegaconf import DictConfig

from lathe.launch import launch_on_run, report_errors


@report_errors
@hydra.main(version_base="1.3", config_path="../configs", config_name="predict")
def main(cfg: DictConfig) -> None:
    launch_on_run(cfg, "lathe.verbs.predict:predict")


if __name__ == "__main__":
    main()
