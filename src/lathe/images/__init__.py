"""Pixels and image files: one way to read them for training, predicting and serving."""
