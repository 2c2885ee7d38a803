"""Merging of evicted pairs: the formulas and the parts that use them."""
