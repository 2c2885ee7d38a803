"""`mmkv bench`: speed and memory of compressed caches beside what a user would run instead."""
