"""Tables as TOML text. The standard library reads TOML but does not write it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any


def dumps(data: Mapping[str, Any]) -> str:
    """TOML of nested mappings, lists and scalars. None is left out: TOML has no null, and absent means default.

    >>> dumps({"run": {"name": "a", "target": None}})
    '[run]\\nname = "a"\\n'
    """
    return "\n".join(_table(data, "")).lstrip("\n") + "\n"


def _table(table: Mapping[str, Any], name: str) -> list[str]:
    lines, later = [], []
    for key, value in table.items():
        place = f"{name}.{_key(key)}" if name else _key(key)
        if isinstance(value, Mapping):
            body = _table(value, place)
            later += ["", f"[{place}]", *body] if body or not value else []
        elif _is_tables(value):
            for item in value:
                later += ["", f"[[{place}]]", *_table(item, place)]
        elif value is not None:
            lines.append(f"{_key(key)} = {_value(value)}")
    return lines + later


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
