"""Which device this process computes on: facts gathered in one place, judged by a pure function."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from primus_turbo_plugin.devices.capabilities import Capabilities, capabilities_of


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """What torch and the operating system say.

    Attributes:
        names: Name of every visible GPU, in torch's order.
        gcn_arch: AMD: `gcnArchName` of the first, such as `gfx950:sramecc+:xnack-`.
        capability: NVIDIA: compute capability of the first.
        memory_bytes: Memory of the first.
        hip: ROCm version torch was built for.
        cuda: CUDA version torch was built for.
        amd_driver: Whether an AMD compute driver is loaded (`/dev/kfd`).
        nvidia_driver: Whether an NVIDIA driver is loaded.
        archs: Architecture of every visible GPU, where it differs from the first.
    """

    names: tuple[str, ...] = ()
    gcn_arch: str | None = None
    capability: tuple[int, int] | None = None
    memory_bytes: int = 0
    hip: str | None = None
    cuda: str | None = None
    amd_driver: bool = False
    nvidia_driver: bool = False
    archs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The device this process computes on.

    Attributes:
        capabilities: Its row of the table.
        name: Product name, `AMD Instinct MI355X`; `CPU` without a GPU.
        count: Visible devices.
        memory_bytes: Memory of one; 0 for a CPU.
        notes: What is odd about it and what to do: a GPU that torch cannot use, an unknown architecture, mixed GPUs.
    """

    capabilities: Capabilities
    name: str
    count: int
    memory_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def torch_device(self) -> str:
        """Device type for torch: `cpu` or `cuda`, which is also ROCm."""
        return self.capabilities.torch_device


def gather_facts() -> DeviceFacts:
    """Asks torch and the operating system; initialises the GPU runtime where there is one."""
    import torch

    base = DeviceFacts(
        hip=torch.version.hip,
        cuda=torch.version.cuda,
        amd_driver=os.path.exists("/dev/kfd"),
        nvidia_driver=os.path.exists("/proc/driver/nvidia/version"),
    )
    if not torch.cuda.is_available():
        return base
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gcn_archs = [item.gcnArchName for item in properties] if torch.version.hip else []
    capabilities = [(item.major, item.minor) for item in properties]
    return dataclasses.replace(
        base,
        names=tuple(item.name for item in properties),
        gcn_arch=gcn_archs[0] if gcn_archs else None,
        capability=None if gcn_archs else capabilities[0],
        memory_bytes=properties[0].total_memory,
        archs=tuple(gcn_archs or [f"sm{major}{minor}" for major, minor in capabilities]),
    )


def detect(facts: DeviceFacts | None = None) -> Device:
    """The device, from `facts` (gathered where None): a pure function of them."""
    facts = gather_facts() if facts is None else facts
    if not facts.names:
        return Device(capabilities=capabilities_of("cpu"), name="CPU", count=1, notes=_unused_gpu(facts))
    if facts.gcn_arch is not None:
        arch = facts.gcn_arch.split(":")[0]
    else:
        assert facts.capability is not None, "a visible GPU has an AMD architecture or a CUDA capability"
        arch = "sm{}{}".format(*facts.capability)
    row = capabilities_of(arch)
    notes = []
    if not row.known:
        notes.append(
            f"{facts.names[0]} ({arch}) is not in this package's table of devices: only BF16 matrix units are assumed"
        )
    others = sorted({other.split(":")[0] for other in facts.archs} - {arch})
    if others:
        notes.append(f"the visible GPUs differ: {arch} and {', '.join(others)}; kernels are chosen for {arch}")
    return Device(
        capabilities=row,
        name=facts.names[0],
        count=len(facts.names),
        memory_bytes=facts.memory_bytes,
        notes=tuple(notes),
    )


def _unused_gpu(facts: DeviceFacts) -> tuple[str, ...]:
    """A GPU whose driver is loaded, and which torch does not see: why, and what to do."""
    for vendor, driver, version, build in (
        ("AMD", facts.amd_driver, facts.hip, "ROCm"),
        ("NVIDIA", facts.nvidia_driver, facts.cuda, "CUDA"),
    ):
        if driver and version is None:
            return (
                f"an {vendor} GPU driver is loaded, but this torch is built without {build}: install a {build} build of torch",
            )
        if driver:
            return (
                f"an {vendor} GPU driver is loaded, but torch sees no GPU: check the container's device access and the "
                "variables HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES",
            )
    return ()
