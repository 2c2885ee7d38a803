"""The suites: what is asked, and what counts as right."""
