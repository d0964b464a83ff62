"""The editable fields of an engine, their places in its EnvironmentFile, and their valid values. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvcache_proto.errors import BadArgument
from kvcache_tools.dashboard import envfile

CONNECTOR, TRANSFER, EXTRA = "KVCacheServerConnector", "KV_TRANSFER_CONFIG", "kv_connector_extra_config"
# A name on the hub, or a path. It must not begin with a hyphen, since it is used on a command line.
_MODEL = re.compile(r"[A-Za-z0-9/][A-Za-z0-9_.+@:/-]{0,254}")


class Field(NamedTuple):
    """One field: a variable, or a key in the connector's settings."""

    name: str
    label: str
    help: str
    kind: str  # text, int, choice
    least: int = 0
    most: int = 0
    choices: tuple[str, ...] = ()
    default: str = ""

    def check(self, text: str) -> str:
        """Return `text` in the form to be written. Raises BadArgument."""
        text = text.strip()
        if self.kind == "int":
            if not (re.fullmatch("[0-9]{1,10}", text) and self.least <= int(text) <= self.most):
                raise BadArgument(f"{self.label} {text!r}: {self.least:,} to {self.most:,}")
            return str(int(text))
        if self.kind == "choice":
            if text not in self.choices:
                raise BadArgument(f"{self.label} {text!r}: one of {', '.join(self.choices)}")
            return text
        if not _MODEL.fullmatch(text) or ".." in text.split("/") or "//" in text:
            raise BadArgument(f"{self.label} {text!r}: a name as in Qwen/Qwen3-8B, or an absolute path expected")
        return text


def _number(name: str, label: str, help: str, least: int, most: int, default: str = "") -> Field:
    return Field(name, label, help, "int", least, most, default=default)


def _choice(name: str, label: str, help: str, *choices: str) -> Field:
    return Field(name, label, help, "choice", choices=choices, default=choices[0])


VARIABLES = (
    Field("MODEL", "Model", "A name on the hub, or an absolute path.", "text"),
    _number("MAX_MODEL_LEN", "Context length", "Tokens of prompt and answer together.", 1, 100_000_000),
)
# The connector's own settings; an empty value removes the key, so that its default applies.
CACHE = (
    _number("block_size", "Block size", "Tokens per cached block: a multiple of the engine's.", 1, 65536, "128 or so"),
    _number("num_cpu_blocks", "Most cached blocks", "Most blocks of this engine; 0: no limit.", 0, 1 << 31, "0"),
    _number("deadline_ms", "Deadline (ms)", "Most milliseconds that a lookup may take.", 1, 10_000, "50"),
    _choice("save", "Save", "All full blocks, or only those of prompts.", "all", "prompt"),
    _choice("verify", "Verify", "Blocks to check against their checksum after a load.", "off", "sample", "all"),
    _number("canary_every", "Canary", "One hit in this many is computed and compared; 0: none.", 0, 1 << 31, "10000"),
)


def read(text: str) -> list[dict[str, Any]]:
    """Return the fields that apply to this file, with their values. Raises BadArgument for a file that is ambiguous."""
    found = {each.key: each.value for each in envfile.parse(text)}
    fields = [field._asdict() | {"value": found[field.name]} for field in VARIABLES if field.name in found]
    extra = _extra(found)
    if extra is not None:
        fields += [field._asdict() | {"value": _text(extra.get(field.name))} for field in CACHE]
    return fields


def change(text: str, values: Mapping[str, str]) -> str:
    """Return `text` with these values of fields. Raises BadArgument, naming the field."""
    found = {each.key: each.value for each in envfile.parse(text)}
    written: dict[str, str] = {}
    left = dict(values)
    for field in VARIABLES:
        if field.name in left:
            value = field.check(left.pop(field.name))
            if value != found.get(field.name):
                written[field.name] = value
    config = _config(found)
    extra = _extra(found)
    for field in CACHE:
        if field.name in left and extra is not None:
            value = left.pop(field.name).strip()
            if value == _text(extra.get(field.name)):
                continue  # an unchanged value is kept even if it is outside these bounds
            if not value:
                extra.pop(field.name, None)
            else:
                extra[field.name] = int(field.check(value)) if field.kind == "int" else field.check(value)
    if left:
        raise BadArgument(f"{', '.join(sorted(left))}: not an editable field")
    if extra is not None and extra != _extra(found):
        written[TRANSFER] = json.dumps(config | {EXTRA: extra})
    return envfile.edit(text, written) if written else text


def _config(found: Mapping[str, str]) -> dict[str, Any]:
    try:
        config = json.loads(found.get(TRANSFER, ""))
    except (ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _extra(found: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the connector's settings; None if the engine has another connector, or none that can be parsed."""
    config = _config(found)
    if config.get("kv_connector") != CONNECTOR:
        return None
    extra = config.get(EXTRA) or {}
    return dict(extra) if isinstance(extra, dict) else None


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)
