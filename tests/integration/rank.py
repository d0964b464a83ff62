"""Processes that stand for the scheduler and the ranks of an engine; a test kills and stops them.

`python rank.py SOCKET` forks one process a line that it reads. Each connects to SOCKET, says its pid, and then answers
commands, one JSON list a line: ["attach", ENDPOINT, ENGINE, SHARDS, SHARDS_IN_ALL], ["reserve", HASH],
["settle", RESERVATION, OUTCOME, SHARDS].
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import sys

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_proto.types import Outcome

SHARD_BYTES = 4096


def spec(shards: int) -> NamespaceSpec:
    return NamespaceSpec(model="two ranks", groups=[GroupSpec(16, (SHARD_BYTES,) * shards)])


def serve(path: str) -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    stream = connection.makefile("rw")
    print(os.getpid(), file=stream, flush=True)
    session = namespace = None
    for line in stream:
        command, *args = json.loads(line)
        answer: object = []
        if command == "attach":
            endpoint, engine, shards, of = args
            session = Session.connect(endpoint, engine=engine, label=f"shards {shards}", deadline=5.0)
            namespace = session.attach(spec(of), shards)
        elif command == "reserve":
            answer = namespace.reserve([bytes.fromhex(args[0])]).id
        elif command == "settle":
            reservation, outcome, shards = args
            answers: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
            namespace.settle(reservation, Outcome(outcome), shards=shards, then=answers.put)
            session.ping()  # answered after it
            with contextlib.suppress(queue.Empty):  # where the daemon refused
                answer = [int(verdict) for verdict in answers.get(timeout=0.02)]
        print(json.dumps(answer), file=stream, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for _ in sys.stdin:
        if os.fork() == 0:
            os.close(0)
            serve(sys.argv[1])
            os._exit(0)
