"""What makes synthetic images, the weights that come with raysim, pretraining, the image cache, image quality.

Imports core, config, data, models and evaluation; it needs neither Ray nor MLflow.
"""
