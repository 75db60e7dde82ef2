"""Makes memory-mapped token files from a folder of text: python scripts/prepare_tokens.py input=books output=books"""

import sys

import hydra
from omegaconf import DictConfig

from lathe.config.composed import resolve
from lathe.launch.start import check_typed
from lathe.launch.stops import stoppable
from lathe.launch.telling import one_sentence, tell


@one_sentence
@hydra.main(version_base="1.3", config_path="../configs", config_name="prepare_tokens")
def main(cfg: DictConfig) -> None:
    try:
        settings = resolve(cfg)
        check_typed(cfg, settings)
        from lathe.data.prepare_tokens import report  # imports torch: only once the command line is known to be right

        with stoppable():
            report(settings)
    except Exception as error:  # told here: Hydra would print lines of its own first
        sys.exit(tell(error))


if __name__ == "__main__":
    main()
