"""Where the daemon is met: the rule of the default, the door beside the socket, and what is no endpoint."""

from __future__ import annotations

import pytest

from kvcache_proto.endpoint import MAX_PATH, check_endpoint, default_endpoint, handshake_path, socket_path
from kvcache_proto.errors import ConfigError


@pytest.mark.parametrize(
    ("environ", "uid", "endpoint"),
    [
        ({}, 0, "ipc:///run/kvcache/kvcache.sock"),
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, 0, "ipc:///run/kvcache/kvcache.sock"),
        ({"XDG_RUNTIME_DIR": "/run/user/7/"}, 7, "ipc:///run/user/7/kvcache/kvcache.sock"),
        ({}, 7, "ipc:///tmp/kvcache-7/kvcache.sock"),
        ({"KVCACHE_ENDPOINT": "ipc:///x.sock"}, 0, "ipc:///x.sock"),
        ({"KVCACHE_ENDPOINT": ""}, 0, "ipc:///run/kvcache/kvcache.sock"),
    ],
)
def test_the_default(environ: dict[str, str], uid: int, endpoint: str) -> None:
    assert default_endpoint(environ, uid) == endpoint


def test_the_handshake_socket_is_beside_the_request_socket() -> None:
    assert socket_path("ipc:///run/kv/kv.sock") == "/run/kv/kv.sock"
    assert handshake_path("ipc:///run/kv/kv.sock") == "/run/kv/kv.door"
    assert handshake_path("ipc:///run/kv/other") == "/run/kv/other.door"


@pytest.mark.parametrize(
    "endpoint", ["", "/run/kv.sock", "tcp://host:1", "ipc://kv.sock", "ipc:///run/", "ipc:///a\0b"]
)
def test_an_invalid_endpoint_is_named(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        check_endpoint(endpoint)


def test_both_paths_fit_the_limit_of_the_kernel() -> None:
    longest = "/" + "x" * (MAX_PATH - 6)
    assert len(handshake_path(f"ipc://{longest}")) == MAX_PATH
    with pytest.raises(ConfigError, match="at most"):
        check_endpoint(f"ipc://{longest}x")
