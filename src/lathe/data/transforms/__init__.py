"""Batched transforms of training images for `data.augment`, on the device, seeded per sample."""
