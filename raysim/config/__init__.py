"""A configuration key, a kind of plug-in: the schema, reading YAML, finding and checking plug-ins.

Imports core alone; everything above may import it.
"""
