"""Decode parts, and the slot schedules that place generated tokens in blocks."""
