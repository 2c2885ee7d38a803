"""The compressed cache: its storage, its eviction, and the slots of new tokens."""
