"""Networks, and a network as one flat vector.

Imports core and config; everything above may import it. It needs torch, not Ray.
"""
