"""The limit on file descriptors, and the number that the daemon may need."""

from __future__ import annotations

import logging
import resource

from kvcache_server.config import Config
from kvcache_server.core.registry import OPERATORS
from kvcache_server.daemon import handshake, request_socket
from kvcache_server.events import subscribers
from kvcache_server.http import connection_limiter

log = logging.getLogger(__name__)

OTHERS = 64  # the region, files, listening sockets, the loop's own; connections about to be closed


def raise_limit() -> None:
    """Raise the soft limit on descriptors to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def needed(config: Config) -> int:
    """Return the maximum number of descriptors that the daemon may need: two per session, one per other connection."""
    crowds = handshake.MAX_HANDSHAKES + request_socket.UNBOUND
    crowds += subscribers.OPEN if config.events else 0
    crowds += connection_limiter.OPEN if config.http else 0
    return 2 * (config.max_sessions + OPERATORS) + crowds + OTHERS


def warn_if_few(config: Config) -> None:
    """Log a warning if the limit is too low for `max_sessions`. Sessions beyond it wait, and their lookups miss."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)[0], needed(config)
    if limit != resource.RLIM_INFINITY and limit < most:
        log.warning(
            "max_sessions %d may need %d descriptors, and the limit is %d: raise it (LimitNOFILE=%d in the unit, "
            "ulimit -Hn elsewhere), or lower max_sessions",
            *(config.max_sessions, most, limit, most),
            extra={"fields": {"event": "few_descriptors", "needed": most, "limit": limit}},
        )
