"""Models behind a compressed cache for other evaluation harnesses."""
