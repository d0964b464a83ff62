"""`python -m kvcache_tools.doctor.engine_side QUESTION`: one finding per line, in JSON, as soon as it is found."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable

import msgspec

from kvcache_tools.doctor.check_result import CheckResult
from kvcache_tools.doctor.engine_side import copies, mapping

QUESTIONS: dict[str, Callable[..., Iterable[CheckResult]]] = {
    "host-copies": copies.on_host,
    "device-copies": copies.on_devices,
    "mapping": mapping.of_region,
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
