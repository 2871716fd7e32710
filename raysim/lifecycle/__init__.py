"""One run in time and on disk: from a configuration to its directory, its MLflow run and its summary.

Imports federation and all below it; `commands` and `cli` import it.
"""
