"""Repeat a finished run, and compare the results bit for bit."""
