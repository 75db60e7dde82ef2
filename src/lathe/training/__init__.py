"""Training: `train.py` reads from the configuration to the result. Nothing below this room imports it."""
