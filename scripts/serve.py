"""Serves a finished run over HTTP: python scripts/serve.py run=logs/latest target=onnx_int8"""

import hydra
from omegaconf import DictConfig

from lathe.launch import launch_on_run, report_errors


@report_errors
@hydra.main(version_base="1.3", config_path="../configs", config_name="serve")
def main(cfg: DictConfig) -> None:
    launch_on_run(cfg, "lathe.serving.options:serve")


if __name__ == "__main__":
    main()
