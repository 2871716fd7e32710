"""How much each client's update counts: rules, what they are made of, server optimisers, the privacy accountant.

Imports core, config, models and local; it needs no Ray.
"""
