"""DeepSpeed's ZeRO, stages 1 to 3, with optional offload of states and parameters to the host."""

from lathe.strategies.deepspeed.strategy import DeepSpeed

__all__ = ["DeepSpeed"]
