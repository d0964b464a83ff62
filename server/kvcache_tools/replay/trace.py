"""Traces of requests in Mooncake's format: one JSON object per line, plain or gzip.

`timestamp` is in ms, `input_length` in tokens, `hash_ids` has one id per block in the order of the prompt; equal ids
mean equal prefixes. `engine`, if present, names the engine that served the request. Other keys are ignored.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import msgspec

from kvcache_proto.errors import ConfigError
from kvcache_proto.types import MAX_HASHES

BLOCK_TOKENS = 512  # of Mooncake's own traces
MAX_LINE = 16 << 20  # bytes: enough for MAX_HASHES ids
_GZIP = b"\x1f\x8b"


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    hash_ids: list[int | str]
    input_length: Annotated[int, msgspec.Meta(ge=0)] | None = None
    engine: Any = ""


_decoder: msgspec.json.Decoder[_Line] = msgspec.json.Decoder(_Line)


class TraceRequest(NamedTuple):
    """A prompt that consists of `blocks`, `at` seconds after the start of the trace."""

    at: float
    blocks: tuple[int | str, ...]
    engine: str = ""


def read_trace(path: str, block_tokens: int = BLOCK_TOKENS) -> list[TraceRequest]:
    """Return the requests in the file `path` that have blocks, by time. Raises ConfigError, naming an invalid line."""
    requests = []
    try:
        for number, line in enumerate(_lines(path), 1):
            if line.strip():
                request = _request(line, f"{path}:{number}", block_tokens)
                if request.blocks:
                    requests.append(request)
    except (OSError, EOFError, ValueError, zlib.error) as error:  # ValueError: not a possible path
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not requests:
        raise ConfigError(f"{path}: no request has blocks")
    return sorted(requests, key=lambda request: request.at)


def _lines(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        packed = file.read(2) == _GZIP
        file.seek(0)
        lines = gzip.GzipFile(fileobj=file) if packed else file
        while line := lines.readline(MAX_LINE + 1):
            if len(line) > MAX_LINE:
                raise ConfigError(f"{path}: a line of more than {MAX_LINE:,} bytes")
            yield line


def _request(line: bytes, where: str, block_tokens: int) -> TraceRequest:
    try:
        found = _decoder.decode(line)
    except (msgspec.MsgspecError, RecursionError) as error:  # RecursionError: brackets nested without end
        raise ConfigError(f"{where}: not a request in Mooncake's format: {error}") from None
    blocks, length = found.hash_ids, found.input_length
    if len(blocks) > MAX_HASHES:
        raise ConfigError(f"{where}: {len(blocks):,} hash_ids: at most {MAX_HASHES:,}")
    if len(set(blocks)) != len(blocks):
        raise ConfigError(f"{where}: an id occurs twice in hash_ids, but each stands for its whole prefix")
    if length is not None and len(blocks) > -(-length // block_tokens):
        raise ConfigError(
            f"{where}: {len(blocks)} blocks of {block_tokens} tokens are more than {length} tokens: give the trace's "
            "own block size with --block-tokens"
        )
    return TraceRequest(found.timestamp / 1000, tuple(blocks), str(found.engine))
