"""Data sets, who owns which sample of them, and what is done to samples.

Imports core alone; it needs neither torch nor Ray.
"""
