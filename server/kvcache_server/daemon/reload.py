"""The settings in effect. On SIGHUP the configuration is read again, and live settings are applied."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from kvcache_proto.errors import ConfigError
from kvcache_server import logs
from kvcache_server.config import Config, settings
from kvcache_server.core.cache import Cache
from kvcache_server.daemon import descriptor_limit
from kvcache_server.daemon.tier_processes import TierProcesses
from kvcache_server.rates import Rate

log = logging.getLogger(__name__)

_LOUDEST_FIRST = ("debug", "info", "warning", "error")


class Reload:
    """Applies changed settings. `config` has the settings in effect."""

    def __init__(
        self,
        config: Config,
        read: Callable[[], Config],
        cache: Cache,
        allow_users: Callable[[Config], None],
        tiers: TierProcesses,
    ) -> None:
        """`allow_users` applies the allowed users and groups to the sockets. Raises OSError."""
        self.config = config
        self._read, self._cache, self._allow_users = read, cache, allow_users
        self._tiers = tiers

    def read_again(self) -> None:
        """Apply changed settings, and log one line with those applied and those that need a restart.

        An invalid configuration changes nothing. If applying the allowed users fails, nothing else is changed. The line
        has the reason, and the next reload tries everything again.
        """
        try:
            wanted = self._read()
        except ConfigError as error:
            log.error("the configuration is not read again, and nothing has changed: %s", error)
            return
        old = self.config
        changed = [row for row in settings() if getattr(wanted, row.name) != getattr(old, row.name)]
        live = {row.name: getattr(wanted, row.name) for row in changed if row.is_live}
        waiting = [row.name for row in changed if not row.is_live]
        config = msgspec.structs.replace(old, **live)
        if {"allow_uids", "allow_gids", "attach_rate", "max_sessions"} & live.keys():
            try:
                self._allow_users(config)
            except OSError as error:
                log.error(
                    "the configuration is not read again; nothing has changed, except perhaps who may use the sockets: "
                    "%s",
                    error,
                )
                return
        self.config = config
        self._cache.set_limits(config.limits())
        self._tiers.apply(config.tier)
        if "max_sessions" in live:
            descriptor_limit.warn_if_few(config)
        log_changes = {"log_level", "log_format"} & live.keys()  # otherwise, a level set at run time stays
        if log_changes:  # the line is logged with the more verbose of the two
            logs.set_up(min(logs.level(), config.log_level, key=_LOUDEST_FIRST.index), config.log_format)
        applied = ", ".join(f"{name} {_shown(getattr(old, name))} -> {_shown(value)}" for name, value in live.items())
        log.log(
            logging.WARNING if waiting else logging.INFO,
            "read the configuration again: %s%s",
            applied or "nothing to apply",
            f"; needs a restart: {', '.join(waiting)}" if waiting else "",
            extra={"fields": {"event": "reload", "applied": list(live), "needs_restart": waiting}},
        )
        if log_changes:
            logs.set_up(config.log_level, config.log_format)


def rate_of(config: Config) -> Rate:
    """Return the allowed rate of handshakes per user. The burst is max_sessions: clients reconnect all at once."""
    return Rate(config.attach_rate, max(config.max_sessions, config.attach_rate))


def _shown(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
