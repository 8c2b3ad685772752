"""The energy that a GPU has used, from NVML, the driver's own library; None where it is silent.

Read by ctypes: two calls do not need a package.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch


@cache
def _nvml() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def joules(device: torch.device) -> float | None:
    """Joules since the driver was loaded, by the whole board; None where NVML does not say."""
    library = _nvml() if device.type == "cuda" else None
    if library is None:
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != 0:
        return None
    if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)) != 0:
        return None
    return millijoules.value / 1e3
