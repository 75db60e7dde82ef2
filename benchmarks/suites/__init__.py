"""The suites of `scripts/benchmark.py`: training, reading data, the Trainer, and inference."""
