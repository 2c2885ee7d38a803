"""The image chat: a page that answers with the full and with a compressed cache, side by side.

`session` holds the models and the conversations and knows no Gradio; `page` is the Gradio page.
"""
