"""The methods of compression as callbacks: they say when an algorithm of `lathe.compression` acts, and carry its
state.
"""
