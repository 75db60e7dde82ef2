"""Options of the targets of an export."""

from lathe.config.schema.rule import Rule, count, flag, null, text, whole, word
from lathe.configs import SOURCE

_integers: dict[str, Rule] = {"integers": flag | None}
_pixels, _samples = whole(1, 2**31).of("pixels"), whole(1, 2**20).of("samples")
TARGETS: dict[str, dict[str, Rule]] = {
    "onnx": {},
    "onnx_int8": {},
    "torch_export": {},
    "weights": {},
    "aot_inductor": {**_integers, "device": word("cpu", "cuda")},
    "executorch": {**_integers, "max_batch_size": _samples},
    "safetensors": {"push_to_hub": text("<user>/<name>", r"[\w.-]+/[\w.-]+") | None},
    "tensorrt": {
        **_integers,
        "through": word("auto", "torch_tensorrt", "onnx"),
        "half": flag,
        "max_batch_size": _samples,
        "typical_batch_size": _samples | null("the largest"),
        "workspace": count.of("bytes") | null("TensorRT's own limit"),
    },
    "torchscript": {"method": word("trace", "script"), "freeze": flag, "fuse": flag},
    "torchserve": {
        **_integers,
        "payload": word("torch_export", "onnx", "aot_inductor", "torchscript") | None,
        "workers": whole(1, 1024),
        "threads": whole(1, 1024) | None,
        "batch_size": whole(1, 2**20),
        "max_batch_delay": whole(0, 2**31),
        "response_timeout": whole(1, 2**31),
        "top_k": count,
        "max_pixels": _pixels,
    },
}


def own_targets() -> dict[str, str]:
    """Modules of the user's export targets, `src/<package>/targets/<name>.py`, by name."""
    files = sorted(SOURCE.glob("*/targets/[!_]*.py")) if SOURCE else []
    return {file.stem: ".".join(file.with_suffix("").parts[-3:]) for file in files}
