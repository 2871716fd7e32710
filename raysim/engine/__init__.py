"""Workers and Ray: placement, the pool, rounds, exact sums. The only package that imports ray.

Imports core, config, models, local, aggregation and evaluation; `federation` and everything above may import it.
"""
