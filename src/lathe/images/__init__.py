"""Pixels and image files: the only readers, for training, prediction and serving."""
