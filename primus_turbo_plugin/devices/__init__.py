"""Which device this is and what it can do."""

from __future__ import annotations

from primus_turbo_plugin.devices.capabilities import CAPABILITIES, FORMATS, Capabilities, Peak, capabilities_of
from primus_turbo_plugin.devices.detect import Device, DeviceFacts, detect, gather_facts

__all__ = [
    "CAPABILITIES",
    "FORMATS",
    "Capabilities",
    "Device",
    "DeviceFacts",
    "Peak",
    "capabilities_of",
    "detect",
    "gather_facts",
]
