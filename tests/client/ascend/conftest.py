"""The model runner of vllm-ascend on the simulated NPU, as far as it can be imported there. `make test-ascend`.

Its patches of models are left out: they need torchvision. Nothing computes; memory is the simulated device's.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest

if importlib.util.find_spec("vllm_ascend") is None:
    pytest.skip("needs vllm-ascend: `make test-ascend`", allow_module_level=True)


@pytest.fixture(scope="session")
def runner_class() -> Any:
    """vllm-ascend's NPUModelRunner."""
    spec = importlib.util.find_spec("vllm_ascend")
    assert spec is not None and spec.submodule_search_locations
    patches = ModuleType("vllm_ascend.patch.worker")
    patches.__path__ = [f"{spec.submodule_search_locations[0]}/patch/worker"]
    sys.modules[patches.__name__] = patches
    import vllm_ascend.ops  # noqa: F401  # first: it and the runner import each other
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    return NPUModelRunner


@pytest.fixture(scope="session", autouse=True)
def _npu() -> None:
    import torch
    import torch_npu  # noqa: F401

    assert torch.npu.is_available()
    torch.npu.set_device(0)
    assert hasattr(ctypes.CDLL("libascendcl.so"), "fake_acl_counter"), "a simulated NPU"
