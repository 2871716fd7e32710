"""How good a model is: on the test split, for each client, and after fine-tuning.

Imports core, config, models and local; everything above may import it. It needs torch, neither Ray nor MLflow.
"""
