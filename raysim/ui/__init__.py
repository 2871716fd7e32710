"""What a person sees: the display in the terminal, figures, tables. The only package that imports matplotlib.

Imports core alone; `lifecycle` and `commands` import it.
"""
