"""What `wrap` changes on a model."""
