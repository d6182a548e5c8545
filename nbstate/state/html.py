"""A small table for the notebook: what a singleton says of itself, as text/html.

Self-contained, because a saved notebook is opened without us: colours come from JupyterLab's own variables, with
fallbacks for pages that have none, so light and dark both work. Everything shown is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

__all__ = ["render_card"]

_BOX = (
    "display:inline-block;padding:8px 12px;border:1px solid var(--jp-border-color2,rgba(128,128,128,.4));"
    "border-radius:4px;color:var(--jp-content-font-color1,inherit);background:var(--jp-layout-color1,transparent);"
    "font-family:var(--jp-content-font-family,system-ui,sans-serif);font-size:var(--jp-content-font-size1,14px)"
)
_DIM = "color:var(--jp-content-font-color2,inherit)"
_CELL = "padding:1px 16px 1px 0;text-align:left;border:0;background:transparent;font-weight:normal"
_CODE = "font-family:var(--jp-code-font-family,monospace);font-size:var(--jp-code-font-size,13px)"


def render_card(title: str, summary: str, rows: Mapping[str, Any]) -> str:
    """A titled table of names and values.

    Parameters
    ----------
    title : str
        The class.
    summary : str
        One sentence.
    rows : mapping of str to object
        Shown in order, by ``str``.

    Returns
    -------
    str
        One HTML element.
    """
    body = "".join(
        f'<tr style="background:transparent"><th scope="row" style="{_CELL};{_DIM}">{escape(name)}</th>'
        f'<td style="{_CELL};{_CODE}">{escape(str(value))}</td></tr>'
        for name, value in rows.items()
    )
    table = f'<table style="margin:6px 0 0;border-collapse:collapse"><tbody>{body}</tbody></table>' if body else ""
    return (
        f'<div class="nbstate-card" style="{_BOX}"><strong>{escape(title)}</strong> '
        f'<span style="{_DIM}">{escape(summary)}</span>{table}</div>'
    )
