"""What training costs by strategy: time and scaling, and memory; and what reading, the Trainer and integers cost beside
the usual way. `scripts/benchmark.py` is the command.
"""
