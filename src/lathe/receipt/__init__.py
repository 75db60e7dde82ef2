"""What a net that was made small has become: metrics, bytes, arithmetic and time beside the dense net, measured here
and now.
"""

from lathe.receipt.measured import write

__all__ = ["write"]
