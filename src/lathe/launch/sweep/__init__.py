"""Sweeps: the jobs of `-m` from a grid, list or search, each in a process, and resumable. Imports no torch."""
