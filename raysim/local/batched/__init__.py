"""Several clients trained at once, on a CPU or a GPU.

Part of `local`: imports what `local` may import.
"""
