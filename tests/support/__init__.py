"""Helpers shared by several tests, by subject; `pythonpath` in setup.cfg makes it importable as `support`."""
