"""Forks engines: vLLM is imported once, and not by each of an engine's three processes, which takes 20 s on one core.

    python mother.py DESCRIPTOR LOCK

The descriptor is a listening socket, to which all workers of a test run connect. Each message of theirs, a JSON object
that is added to the environment, comes with three descriptors: what the engine reads (see engine.py), where it answers,
its log. The answer is its process id. An engine leads a session of its own; it ends when nobody writes to it any more,
and the mother when all connections are closed. LOCK is a file that is locked by whoever connects.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import multiprocessing
import os
import select
import socket
import sys

import engine


def fork_what_is_to_be_spawned() -> None:
    """vLLM forks its processes, but not on CPUs: threads of OpenMP's would not live through it, and here are none."""
    of = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: of("fork" if method == "spawn" else method)


def have_those_who_wait_sleep() -> None:
    """vLLM's processes spin for a second after each message: on few cores they take the time of whom they wait for."""
    from vllm.distributed.device_communicators import cpu_communicator, shm_broadcast

    wait = shm_broadcast.SpinCondition
    wait.__init__ = functools.partialmethod(wait.__init__, busy_loop_s=0.0)
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 20  # vLLM's own cure for a notification that is lost
    # Its ranks spin in shared memory for each other; torch's own collectives wait in the kernel.
    cpu_communicator.CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def bear(descriptors: list[int], environment: dict[str, str]) -> None:
    """Be an engine, in a forked child."""
    os.setsid()
    commands, answers, log = descriptors
    for ours, standard in ((commands, 0), (log, 1), (log, 2)):
        os.dup2(ours, standard)
    os.environ.update(environment)
    engine.main(answers)


def nobody_comes(listener: socket.socket) -> bool:
    """Close the listener, unless somebody has connected to it meanwhile."""
    with open(sys.argv[2]) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if select.select([listener], [], [], 0)[0]:
            return False
        listener.close()
        return True


def main() -> None:
    if os.fork():
        return  # who starts it need not wait for it
    fork_what_is_to_be_spawned()
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401 - what the engine's processes import
    from transformers import LlamaForCausalLM  # noqa: F401
    from vllm import LLM  # noqa: F401

    have_those_who_wait_sleep()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread: forked children would lack it"
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.setblocking(False)
    connected = [listener]
    while True:
        for ready in select.select(connected, [], [])[0]:
            if ready is listener:
                connected.append(listener.accept()[0])
                continue
            message, descriptors, _, _ = socket.recv_fds(ready, 1 << 16, 3)
            if not message:
                connected.remove(ready)
                ready.close()
                if connected == [listener] and nobody_comes(listener):
                    return
                continue
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            child = os.fork()
            if not child:
                for each in connected:
                    each.close()
                bear(descriptors, json.loads(message))
                return
            for descriptor in descriptors:
                os.close(descriptor)
            ready.send(json.dumps(child).encode())


if __name__ == "__main__":
    main()
