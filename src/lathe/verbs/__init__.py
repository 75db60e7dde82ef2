"""The commands other than training: scripts/X.py runs lathe/verbs/X.py."""
