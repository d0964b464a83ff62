"""`python -m kvcache_tools.doctor.engine_side QUESTION`: one finding per line, in JSON, as soon as it is found."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator

import msgspec

from kvcache_client.session.session import Session
from kvcache_proto.errors import KVCacheError
from kvcache_tools.doctor.check_result import CheckResult
from kvcache_tools.doctor.engine_side import copies


def mapping(endpoint: str) -> Iterator[CheckResult]:
    """Attach as an engine does, to check whether one gets the daemon's region here. Leaves nothing in the cache."""
    try:
        # Named like an operator's commands: it gets a session even if engines have taken all the others.
        with Session.connect(endpoint, engine="kvcache-server", label="mapping") as session:
            region = session.region
            assert region is not None  # a connected session has one
            figure = f"{region.bytes:,} bytes, format and geometry as this client knows them"
            yield CheckResult("mapping", "ok", figure, how="measured", values={"region_bytes": region.bytes})
    except KVCacheError as error:
        yield CheckResult("mapping", "failed", str(error), "an engine here would run uncached until this is mended")


QUESTIONS: dict[str, Callable[..., Iterable[CheckResult]]] = {
    "host-copies": copies.on_host,
    "device-copies": copies.on_devices,
    "mapping": mapping,
}


def main() -> None:
    # torch loads torch_npu by itself and fails if that is broken; a check that needs it imports it by name.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    # Libraries write to stdout: give the findings a descriptor of their own, and redirect stdout to stderr.
    with os.fdopen(os.dup(1), "wb", buffering=0) as answers:
        os.dup2(2, 1)
        question, *arguments = sys.argv[1:]
        for finding in QUESTIONS[question](*arguments):
            answers.write(msgspec.json.encode(finding) + b"\n")


if __name__ == "__main__":
    main()
