"""A several times smaller key-value cache for vision-language models and LLMs while they generate."""
