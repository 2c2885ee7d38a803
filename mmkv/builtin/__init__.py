"""The built-in vision-language model, its data and its training."""
