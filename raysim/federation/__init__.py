"""The two phases of a run: images are made, then the server trains round after round.

Imports engine and what lies below it; `lifecycle` imports it. It knows no files of a run and no MLflow.
"""
