"""The suites: their prompts, reference answers and metrics."""
