"""Number formats; one that the device does not support raises an error and is never replaced."""

from typing import Any, Literal

import torch
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lathe.config.types import Count, Positive, PrecisionName
from lathe.config.validation import validated
from lathe.errors import require


@validated
def precision_plugin(
    name: PrecisionName | Literal["auto"],
    device_type: str,
    matmul: Literal["highest", "high", "medium"] = "highest",
    init_scale: Positive = 65536.0,
    growth_interval: Count = 2000,
) -> dict[str, Any]:
    """Return the Trainer argument for format `name` on `device_type` (cpu, cuda or mps).

    `auto` takes the format that the device multiplies fastest, and prints it. Lightning silently turns 16-mixed on a
    CPU into bf16-mixed; here it is float16 with a gradient scaler.
    """
    if name == "auto":
        name, reason = best_format(device_type)
        rank_zero_only(print)(f"precision=auto took {name}: {reason}.", flush=True)
    require(
        device_type != "mps" or name != "64-true",
        "precision=64-true: Apple's GPUs have no float64; use trainer.accelerator=cpu or precision=32-true.",
    )
    if device_type == "cuda" and name.startswith("bf16"):
        require(
            torch.cuda.is_bf16_supported(including_emulation=False),
            f"precision={name}: {torch.cuda.get_device_name()} has no bfloat16 arithmetic; use 16-mixed or 32-true.",
        )
    set_float32(matmul)
    if name == "16-mixed":
        scaler = torch.amp.GradScaler(device_type, init_scale=init_scale, growth_interval=growth_interval)
        return {"plugins": [MixedPrecision("16-mixed", device_type, scaler=scaler)]}
    if name == "64-true":  # Lightning does not accept the name for some strategies that the plugin works with
        return {"plugins": [DoublePrecision()]}
    return {"precision": name}


def best_format(device_type: str) -> tuple[PrecisionName, str]:
    """Return the format that devices of this type multiply fastest, and the reason.

    On CPUs bfloat16 is faster only with AMX tiles: with AVX-512's bfloat16 instructions, a ResNet-18 took 1.3 times as
    long as in float32.
    """
    if device_type == "cuda":
        name = torch.cuda.get_device_name()
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16-mixed", f"{name} has bfloat16 arithmetic"
        if torch.cuda.get_device_capability() >= (7, 0):
            return "16-mixed", f"{name} has float16 arithmetic, and no bfloat16"
        return "32-true", f"{name} has no 16-bit matrix units"
    if device_type == "cpu":
        if torch.cpu._is_amx_tile_supported():
            return "bf16-mixed", "the CPU has AMX units for bfloat16"
        return "32-true", "the CPU has no AMX units, without which bfloat16 is slower"
    return "32-true", f"bfloat16 on {device_type} is not known to be faster"


def set_float32(matmul: str) -> None:
    """Set the precision of float32 products and convolutions.

    "highest" is full float32, "high" is TF32 on NVIDIA GPUs that have it, "medium" uses bfloat16 passes where torch has
    them. By default cuDNN's convolutions and recurrent nets use TF32 (10 bits of mantissa), but matrix products don't.
    Both switches are of torch's older API, which also sets the newer `fp32_precision`; after mixing both APIs the
    values can't be read.
    """
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = matmul != "highest"
