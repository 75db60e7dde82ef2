"""Training: `train.py` reads from the configuration to the result. Only commands and benchmarks import this package."""
