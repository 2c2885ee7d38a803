"""The compressed cache: what it holds, how it evicts, and where a new token goes."""
