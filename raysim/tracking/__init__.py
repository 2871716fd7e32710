"""MLflow: the run that mirrors a run directory, its store, its process. The only package that imports mlflow.

Imports core alone; `lifecycle` and `commands` import it.
"""
