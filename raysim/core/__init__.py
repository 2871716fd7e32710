"""Records, random streams, errors, exact rounding, files, signals: what every other package builds on.

Imports nothing of raysim but itself; everything may import it.
"""
