"""How much each client's update counts: rules, OUI and its probe, server optimisers, the privacy mechanism.

Imports core, config, models and local; `engine` and everything above may import it. It needs no Ray.
"""
