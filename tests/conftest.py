"""What all tests share."""

import os
import tempfile

# Two torch threads on two busy cores wait for each other more than they compute. Set before torch is imported; subprocesses inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
# A test must not reach for a network.
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
# The key that marks exports as made here lies in the user's folder, which is none of a test's business.
os.environ["XDG_STATE_HOME"] = os.path.join(tempfile.gettempdir(), f"lathe-tests-{os.getuid()}")

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _clean_state():
    """Each test starts without a composed configuration and leaves torch's global settings as they were."""
    GlobalHydra.instance().clear()
    os.environ.pop("LATHE_TRUSTED", None)  # what an earlier command in this process trusted
    matmul = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(matmul)
    GlobalHydra.instance().clear()
