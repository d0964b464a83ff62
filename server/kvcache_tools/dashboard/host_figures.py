"""The host's own figures: processors, memory, file systems, device memory."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from kvcache_proto.errors import ConfigError


class Share(msgspec.Struct, omit_defaults=True):
    """A part of a memory or file system that is used, in bytes."""

    used: int
    total: int
    name: str = ""
    path: str = ""


class Cpu(msgspec.Struct):
    """`share` is the part of all cores that was busy since the last time, `load` the average of a minute."""

    share: float
    cores: int
    load: float


class Host(msgspec.Struct):
    """`no_devices` is the reason that device memory is not known."""

    cpu: Cpu
    memory: Share
    swap: Share
    disks: list[Share]
    devices: list[Share]
    no_devices: str


class HostFigures:
    """Reads this host's figures. `figures` may block for some milliseconds: call it in a thread, one call at a time."""

    def __init__(self) -> None:
        """Raises ConfigError if psutil is not installed."""
        try:
            import psutil
        except ImportError:
            raise ConfigError("the dashboard needs psutil: pip install 'kvcache-server[dashboard]'") from None
        self._psutil = psutil
        self._devices: list[tuple[str, Any]] | None = None
        self._why_none = ""
        psutil.cpu_percent()  # the next call reports the time since this one

    def figures(self, region: str) -> Host:
        """Return the present figures. `region` is the path of the daemon's region, "" if unknown."""
        memory, swap = self._psutil.virtual_memory(), self._psutil.swap_memory()
        devices, no_devices = self._device_memory()
        return Host(
            cpu=Cpu(
                share=self._psutil.cpu_percent() / 100,
                cores=self._psutil.cpu_count() or 1,
                load=round(os.getloadavg()[0], 2),
            ),
            memory=Share(memory.total - memory.available, memory.total),
            swap=Share(swap.used, swap.total),
            disks=self._disks(region),
            devices=devices,
            no_devices=no_devices,
        )

    def _disks(self, region: str) -> list[Share]:
        """The region's file system, and the root's."""
        found = []
        for name, path in (("region", os.path.dirname(region)), ("root", "/")):
            try:
                usage = self._psutil.disk_usage(path) if path else None
            except OSError:  # the daemon may have other mounts than this process
                usage = None
            if usage is not None:
                found.append(Share(usage.used, usage.total, name, path))
        return found

    def _device_memory(self) -> tuple[list[Share], str]:
        if self._devices is None:
            self._devices = self._find()
        if not self._devices:
            return [], self._why_none
        import pynvml

        found = []
        for name, handle in self._devices:
            try:
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            except pynvml.NVMLError as error:
                return [], f"{name}: {error}"
            found.append(Share(int(memory.used), int(memory.total), name))
        return found, ""

    def _find(self) -> list[tuple[str, Any]]:
        """Find NVIDIA devices. This is done once: a running host does not gain any."""
        try:
            import pynvml
        except ImportError:
            self._why_none = "nvidia-ml-py is not installed"
            return []
        try:
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
            return [(f"{at}: {pynvml.nvmlDeviceGetName(handle)}", handle) for at, handle in enumerate(handles)]
        except pynvml.NVMLError as error:
            self._why_none = f"no NVIDIA driver here ({error})"
            return []
