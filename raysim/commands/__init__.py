"""What one command does, in a module or a package each; `cli` only reads arguments.

Imports everything below; only `cli` imports it.
"""
