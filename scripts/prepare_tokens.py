"""Makes memory-mapped token files from a folder of text: python scripts/prepare_tokens.py input=books output=books"""

import sys

import hydra
from omegaconf import DictConfig

from lathe.config.resolve import resolve
from lathe.launch.command_checks import check_command
from lathe.launch.error_reporting import raise_on_signal, report_error, report_errors


@report_errors
@hydra.main(version_base="1.3", config_path="../configs", config_name="prepare_tokens")
def main(cfg: DictConfig) -> None:
    try:
        settings = resolve(cfg)
        check_command(cfg, settings)
        from lathe.data.token_file import report  # imported late, since it imports torch

        with raise_on_signal():
            report(settings)
    except Exception as error:  # caught here, as Hydra would print lines first
        sys.exit(report_error(error))


if __name__ == "__main__":
    main()
