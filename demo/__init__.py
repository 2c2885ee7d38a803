"""The image chat: a page that answers with the full and with a compressed cache, side by side."""
