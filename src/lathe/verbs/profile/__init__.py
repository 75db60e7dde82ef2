"""Where a step of a run goes: measured in a few steps of it, and shown on a page."""

from lathe.verbs.profile.command import profile

__all__ = ["profile"]
