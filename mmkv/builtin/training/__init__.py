"""How smollm2-vision was trained and measured; not part of the wheel."""
