"""Models, checkpoints and files from elsewhere, read with care."""
