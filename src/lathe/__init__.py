"""Lathe: a Lightning + Hydra research template."""
