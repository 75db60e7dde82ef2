"""Number formats. What a device can't do is refused, never replaced by something else."""

from typing import Any

import torch
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision

from lathe.config.schema.held import held
from lathe.errors import UserError


@held("precision")
def precision_plugin(
    name: str, device_type: str, matmul: str = "highest", init_scale: float = 65536.0, growth_interval: int = 2000
) -> dict[str, Any]:
    """The Trainer arguments, `precision` or `plugins`, that bring format `name` to devices of `device_type` (cpu, cuda
    or mps).

    Lightning turns 16-mixed on a CPU into bf16-mixed without a word; here it is real float16 with a gradient scaler.

    Raises:
        UserError: a format that this device can't do.
    """
    if device_type == "mps" and name == "64-true":
        raise UserError(
            "precision=64-true: Apple's GPUs have no float64; use trainer.accelerator=cpu or precision=32-true."
        )
    if (
        device_type == "cuda"
        and name.startswith("bf16")
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise UserError(
            f"precision={name}: {torch.cuda.get_device_name()} has no bfloat16 arithmetic; use precision=16-mixed or "
            "32-true."
        )
    set_float32(matmul)
    if name == "16-mixed":
        scaler = torch.amp.GradScaler(device_type, init_scale=init_scale, growth_interval=growth_interval)
        return {"plugins": [MixedPrecision("16-mixed", device_type, scaler=scaler)]}
    if name == "64-true":  # by its name Lightning refuses it for strategies that it works with
        return {"plugins": [DoublePrecision()]}
    return {"precision": name}


def set_float32(matmul: str) -> None:
    """How float32 products and convolutions are computed: "highest" in full float32, "high" in TF32 on NVIDIA GPUs that
    have it, "medium" with bfloat16 passes where torch has them.

    Left to themselves, cuDNN's convolutions and recurrent nets use TF32 (10 bits of mantissa) while matrix products
    don't. Both switches are of torch's older kind, which sets the newer `fp32_precision` along; a mixture of both kinds
    can't be read any more.
    """
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = matmul != "highest"
