"""What setup.cfg can't say: a wheel takes the configurations along, which in a clone lie at its root for everybody to
edit.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """Puts configs/ into the wheel as the files of lathe.configs; an editable install goes on reading those at the
    root.
    """

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "lathe", "configs")
            left = shutil.ignore_patterns("local", "__init__.py", "__pycache__")  # local/ is of this machine
            shutil.copytree("configs", target, dirs_exist_ok=True, ignore=left)


setup(cmdclass={"build_py": BuildWithConfigs})
