"""The reference of the run file, generated from its code."""

from __future__ import annotations

from slipstream.config import settings


def markdown() -> str:
    """A Markdown table of every setting: dotted name, default, sentence."""
    rows = [f"| `{name}` | `{default}` | {sentence.replace('|', chr(92) + '|')} |" for name, default, sentence in settings()]
    return "\n".join(["# Settings of the run file", "", "| setting | default | what it does |", "|---|---|---|", *rows]) + "\n"
