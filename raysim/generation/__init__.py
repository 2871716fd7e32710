"""Generators of synthetic images, the weights that come with raysim, pretraining, the image cache, image quality.

Imports core, config, data, models and evaluation; `federation` and everything above may import it. It needs no Ray.
"""
