"""What becomes of evicted pairs: each file is one way, its formula and its part."""
