"""What mkdocs runs while it builds the pages: diagrams are drawn, and nothing comes from a network.

On GitHub a browser draws the mermaid blocks; here they become SVG in the page, since the theme
would load mermaid from a CDN.
"""

from __future__ import annotations

import re
from typing import Any

_BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Tags that make a browser ask another server; links that are only said or followed do not.
_LOADED = re.compile(
    r"""<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=["']?(?:https?:)?//[^>]*>"""
)
_NOT_LOADED = re.compile(r"""rel=["']?(?:canonical|prev|next|alternate)""")


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Replace mermaid blocks by what they draw."""
    import mermaidx

    def draw(found: re.Match[str]) -> str:
        svg: str = mermaidx.render(found[1], theme="neutral").svg()
        return f'<div class="diagram">{svg}</div>\n'

    return _BLOCK.sub(draw, markdown)


def on_post_page(output: str, page: Any, **kwargs: Any) -> str:
    """Refuse a page that loads something from a network.

    Raises:
        PluginError: names the page and the tag.
    """
    from mkdocs.exceptions import PluginError

    for tag in _LOADED.finditer(output):
        if not _NOT_LOADED.search(tag[0]):
            raise PluginError(f"{page.file.src_path} loads from a network: {tag[0]}")
    return output
