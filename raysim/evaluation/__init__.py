"""How good a model is: on the test split, for each client, and after fine-tuning.

Imports core, config, models and local; it needs torch, neither Ray nor MLflow.
"""
