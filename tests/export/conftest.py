"""Nets for the tests of exports."""

from support.export_nets import images, make_images, make_mlp, make_resnet, quantized

__all__ = ["images", "make_images", "make_mlp", "make_resnet", "quantized"]
