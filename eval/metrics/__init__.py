"""Metrics as `evaluate` modules, loaded from the package."""
