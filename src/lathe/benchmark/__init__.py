"""Benchmarks of training, data loading, the Trainer and integer inference. `scripts/benchmark.py` is the command."""
