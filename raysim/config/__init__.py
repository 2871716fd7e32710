"""The configuration schema, how it is read, and the registry of plug-ins with the contract of each kind.

Imports core alone; everything above may import it.
"""
