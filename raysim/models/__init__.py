"""Networks, and a network as one flat vector.

Imports core alone; it needs torch, not Ray.
"""
