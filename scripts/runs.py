"""Lists, compares and tidies the runs below logs: python scripts/runs.py where=[state=complete,optimizer.lr=0.1]"""

import sys

import hydra
from omegaconf import DictConfig

from lathe.config.composed import resolve
from lathe.launch.start import check_typed
from lathe.launch.telling import one_sentence, tell
from lathe.verbs.runs.command import runs


@one_sentence
@hydra.main(version_base="1.3", config_path="../configs", config_name="runs")
def main(cfg: DictConfig) -> None:
    try:
        request = resolve(cfg)
        check_typed(cfg, request)
        runs(request)
    except Exception as error:
        sys.exit(tell(error))  # here: Hydra would print a line of its own first


if __name__ == "__main__":
    main()
