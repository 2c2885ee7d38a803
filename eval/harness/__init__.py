"""Models with a compressed cache, for other evaluation harnesses."""
