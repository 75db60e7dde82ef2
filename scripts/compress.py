"""Makes a finished run smaller, without training, as a new run: python scripts/compress.py run=logs/latest
compression=ptq_static
"""

import hydra
from omegaconf import DictConfig

from lathe.launch import launch_on_run, report_errors


@report_errors
@hydra.main(version_base="1.3", config_path="../configs", config_name="compress")
def main(cfg: DictConfig) -> None:
    launch_on_run(cfg, "lathe.verbs.compress:compress")


if __name__ == "__main__":
    main()
