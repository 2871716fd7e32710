"""Training on a client: the one loop, and the local algorithms that hook into it.

Imports core, config and models; everything above may import it. It needs torch, neither Ray nor MLflow.
"""
