"""DeepSpeed's ZeRO, stages 1 to 3, with states and parameters on the host where asked."""

from lathe.strategies.deepspeed.strategy import DeepSpeed

__all__ = ["DeepSpeed"]
