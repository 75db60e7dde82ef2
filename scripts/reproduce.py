"""Makes a finished run once more and compares: python scripts/reproduce.py run=logs/latest"""

import sys

import hydra
from omegaconf import DictConfig

from lathe.config.composed import resolve
from lathe.launch.start import check_typed
from lathe.launch.telling import one_sentence, tell
from lathe.verbs.reproduce.command import reproduce


@one_sentence
@hydra.main(version_base="1.3", config_path="../configs", config_name="reproduce")
def main(cfg: DictConfig) -> None:
    try:
        request = resolve(cfg)
        check_typed(cfg, request)
        code = reproduce(request)
    except Exception as error:
        code = tell(error)  # here: Hydra would print a line of its own first
    sys.exit(code)


if __name__ == "__main__":
    main()
