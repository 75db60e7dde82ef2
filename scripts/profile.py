"""Where a training step and an inference batch of a run go: python scripts/profile.py run=logs/latest"""

import sys
import sysconfig
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import hydra
from omegaconf import DictConfig

from lathe.launch import launch_on_run, report_errors


@report_errors
@hydra.main(version_base="1.3", config_path="../configs", config_name="profile")
def main(cfg: DictConfig) -> None:
    launch_on_run(cfg, "lathe.verbs.profile:profile")


if __name__ == "__main__":
    main()
elif __name__ == "profile":
    # cProfile imports Python's own module `profile`, but for a script in this folder finds this file first.
    spec = spec_from_file_location("profile", Path(sysconfig.get_path("stdlib")) / "profile.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["profile"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["profile"])
