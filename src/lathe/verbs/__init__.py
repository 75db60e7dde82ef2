"""What a command does, each in a file of its name: train.py runs lathe/verbs/train.py, scripts/X.py runs
lathe/verbs/X.py.
"""
