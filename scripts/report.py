"""Runs side by side: python scripts/report.py runs=logs/<name>"""

import sys

import hydra
from omegaconf import DictConfig

from lathe.config.composed import resolve
from lathe.launch.start import check_typed
from lathe.launch.telling import one_sentence, tell


@one_sentence
@hydra.main(version_base="1.3", config_path="../configs", config_name="report")
def main(cfg: DictConfig) -> None:
    from lathe.verbs.report import report  # here: --help need not import it

    try:
        settings = resolve(cfg)
        check_typed(cfg, settings)
        report(settings)
    except Exception as error:
        sys.exit(tell(error))  # here: Hydra would print a line of its own first


if __name__ == "__main__":
    main()
