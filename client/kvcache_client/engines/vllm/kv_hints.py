"""vLLM's `Request.kv_hints`, from 0.32 on: hints of a router or an orchestrator. Pure.

vLLM defines only the envelope (`vllm.v1.kv_hints`): a protocol version, and actions, each with a type, a version and a
payload. It passes the envelope on unchecked; the component that carries out an action defines its payload:

- `kv.retain`, as in vLLM's draft of an executor: keep ranges of tokens for some seconds, for example while a session
  waits for its tool. A retention of ours also holds the blocks before a range, which is of no use without them.
  Priorities are not compared, because a quota limits what is retained. For the same reason, a range without a duration
  is kept only as long as with `retain: true`.
- `kv.fetch` of KVCR, the only component in vLLM that reads the envelope, and `kv.prefetch` of SGLang: bring the blocks
  of the request closer before it is scheduled. Tiers know where blocks are, so that no payload is needed.
- `kv.deref` of SGLang: the session has ended.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvcache_client.scheduler.views import RETAIN_SECONDS, BadHint, Hint, Retain
from kvcache_proto.messages import MAX_SECONDS

PROTOCOL = "0.1"
MOST_ACTIONS, MOST_RETAINED = 64, 128  # actions, and ranges to retain, in one envelope
_Tokens = Annotated[int, msgspec.Meta(ge=0)]


class _Action(msgspec.Struct):
    action_type: str
    action_version: str
    payload: dict[str, Any]


class _Envelope(msgspec.Struct):
    protocol_version: str
    actions: Annotated[list[_Action], msgspec.Meta(max_length=MOST_ACTIONS)]


class _Directive(msgspec.Struct, forbid_unknown_fields=True):
    """Keep the tokens from `start` to `end`, by default that of the answer, or those of the answer."""

    priority: Annotated[int, msgspec.Meta(ge=0, le=100)]  # 0 ends an earlier retention
    start: _Tokens = 0
    end: _Tokens | None = None
    duration: Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)] | None = None  # seconds
    covers_output: bool = False

    def __post_init__(self) -> None:
        if self.end is not None and (self.end <= self.start or self.covers_output):
            raise ValueError("`end` must be after `start`, and excludes `covers_output`")


class _Retention(msgspec.Struct):
    directives: Annotated[list[_Directive], msgspec.Meta(max_length=MOST_RETAINED)]


def read_kv_hints(envelope: Any) -> tuple[Hint | None, list[BadHint]]:
    """Return the hint in an envelope, None if there is none, and what is ignored. Never raises for a bad envelope."""
    try:
        found = msgspec.convert(envelope, _Envelope, from_attributes=True)
    except msgspec.ValidationError as error:
        return None, [BadHint("hints_invalid", f"kv_hints: {error}")]
    if found.protocol_version != PROTOCOL:
        return None, [BadHint("hints_unknown_protocol", f"kv_hints of protocol {found.protocol_version[:32]!r}")]
    retain: list[Retain] = []
    bad: list[BadHint] = []
    done = fetch = False
    for action in found.actions:
        name = f"{action.action_type[:32]}@{action.action_version[:32]}"
        match action.action_type, action.action_version.partition(".")[0]:
            case "kv.retain", "1":
                try:
                    directives = msgspec.convert(action.payload, _Retention).directives
                    if len(retain) + len(directives) > MOST_RETAINED:
                        raise msgspec.ValidationError(f"more than {MOST_RETAINED} directives")
                except msgspec.ValidationError as error:
                    bad.append(BadHint("hints_invalid", f"kv_hints, {name}: {error}"))
                    continue
                retain += [_retained(each) for each in directives if each.priority and each.duration != 0]
                if not all(each.priority for each in directives):
                    bad.append(BadHint("hints_unknown_action", f"kv_hints, {name}: a retention cannot be ended"))
            case "kv.fetch" | "kv.prefetch", "1":
                fetch = True
            case "kv.deref", "1":
                done = True
            case _:
                bad.append(BadHint("hints_unknown_action", f"kv_hints: {name}"))
    hint = Hint(retain=tuple(retain), done=done, fetch=fetch)
    return (hint if retain or done or fetch else None), bad


def _retained(directive: _Directive) -> Retain:
    seconds = RETAIN_SECONDS if directive.duration is None else directive.duration
    return Retain(seconds, directive.end, answer=directive.end is None)
