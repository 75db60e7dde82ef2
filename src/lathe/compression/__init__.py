"""Compression algorithms on tensors and modules, without Lightning; callbacks schedule them."""
