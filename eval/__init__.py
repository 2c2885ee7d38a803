"""Evaluation: suites, metrics, runner and report."""
