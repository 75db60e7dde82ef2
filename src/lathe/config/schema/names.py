"""One name for each class and function that a configuration can build."""


def canonical(target: str) -> str:
    """Return the name in the tables of the class at a dotted path, whose file may be named or left out:
    lathe.callbacks.ema.EMA is lathe.callbacks.EMA, lightning.pytorch.callbacks.EarlyStopping is
    lightning.EarlyStopping."""
    words = target.split(".")
    root, name = words[0], words[-1]
    if root in ("lightning", "pytorch_lightning"):
        return f"lightning.{name}"
    return f"{root}.{words[1]}.{name}" if root in ("lathe", "torch") and len(words) > 2 else target
