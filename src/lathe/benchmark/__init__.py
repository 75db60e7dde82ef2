"""What training costs by strategy: time and scaling, and memory. `scripts/benchmark.py` is the command."""
