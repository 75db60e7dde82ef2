"""What several tests share, by subject; `pythonpath` in setup.cfg makes it importable as `support`."""
