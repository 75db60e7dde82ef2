"""The logger for Comet, which Lathe neither installs nor tests in full."""

import hashlib
from pathlib import Path

from lightning.pytorch.loggers import Logger

from lathe.config.types import Name
from lathe.config.validation import validated
from lathe.errors import UserError


@validated
def comet(
    run_dir: Path,
    start_step: int,
    project: Name = "lathe",
    workspace: Name | None = None,
) -> Logger:
    """Comet, online, since Lightning's logger does not keep offline experiments.

    A resumed run continues the same experiment. The key is read from COMET_API_KEY or Comet's own file.
    """
    try:
        import comet_ml  # noqa: F401
    except ImportError as error:
        raise UserError("logger=comet needs the comet-ml package: pip install comet-ml.") from error
    from lightning.pytorch.loggers import CometLogger

    key = hashlib.sha256(run_dir.name.encode()).hexdigest()[:40]  # 32 to 50 letters and digits
    return CometLogger(
        project=project, workspace=workspace, experiment_key=key, mode="get_or_create", online=True, name=run_dir.name
    )
