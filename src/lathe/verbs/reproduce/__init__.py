"""A finished run made once more, and whether it is the same bit for bit."""
