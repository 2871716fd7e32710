"""`raysim sweep`: every combination of a grid, and its table.

Part of `commands`: imports what `commands` may import.
"""
