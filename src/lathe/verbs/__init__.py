"""The commands besides training: scripts/X.py runs lathe/verbs/X.py."""
