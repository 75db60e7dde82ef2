"""Algorithms that make nets small: functions and small classes on tensors and modules, without Lightning. Callbacks say
when they act.
"""
