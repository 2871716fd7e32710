"""Data sets, who owns which sample of them, and what is done to samples.

Imports core and config; `allocation` and everything above may import it. No Ray; torch only for torchvision's sets.
"""
