"""Detection of every architecture from injected facts: no test here needs a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from primus_turbo_plugin.devices import Device, DeviceFacts, detect, gather_facts


@pytest.mark.parametrize(
    ("facts", "arch", "count"),
    [
        (DeviceFacts(), "cpu", 1),
        (
            DeviceFacts(names=("AMD Instinct MI300X",), gcn_arch="gfx942:sramecc+:xnack-", archs=("gfx942",)),
            "gfx942",
            1,
        ),
        (DeviceFacts(names=("AMD Instinct MI355X",) * 8, gcn_arch="gfx950:sramecc+:xnack-", hip="7.0"), "gfx950", 8),
        (DeviceFacts(names=("AMD Instinct MI455X",), gcn_arch="gfx1250"), "gfx1250", 1),
        (DeviceFacts(names=("NVIDIA A100",), capability=(8, 0)), "sm80", 1),
        (DeviceFacts(names=("NVIDIA H200",) * 2, capability=(9, 0), archs=("sm90", "sm90")), "sm90", 2),
        (DeviceFacts(names=("NVIDIA B200",), capability=(10, 0)), "sm100", 1),
    ],
)
def test_known_device_is_recognised_without_notes(facts: DeviceFacts, arch: str, count: int) -> None:
    device = detect(facts)
    assert (device.capabilities.arch, device.count, device.notes) == (arch, count, ())
    assert device.name == (facts.names[0] if facts.names else "CPU")
    assert device.torch_device == ("cpu" if arch == "cpu" else "cuda")


@pytest.mark.parametrize(
    ("facts", "arch"),
    [
        (DeviceFacts(names=("AMD Instinct MI250X",), gcn_arch="gfx90a:sramecc+:xnack-"), "gfx90a"),
        (DeviceFacts(names=("NVIDIA B300",), capability=(10, 3)), "sm103"),
    ],
)
def test_device_outside_the_table_is_used_cautiously_and_noted(facts: DeviceFacts, arch: str) -> None:
    device = detect(facts)
    assert device.capabilities.arch == arch
    assert not device.capabilities.known
    assert [facts.names[0] in note and arch in note for note in device.notes] == [True]


def test_mixed_gpus_are_noted() -> None:
    facts = DeviceFacts(names=("a", "b"), gcn_arch="gfx950:x", archs=("gfx950:x", "gfx942:y"))
    assert [("gfx950" in note, "gfx942" in note) for note in detect(facts).notes] == [(True, True)]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (DeviceFacts(amd_driver=True), ["AMD", "built without ROCm", "install a ROCm build"]),
        (DeviceFacts(nvidia_driver=True), ["NVIDIA", "built without CUDA"]),
        (DeviceFacts(amd_driver=True, hip="7.0"), ["AMD", "sees no GPU", "HIP_VISIBLE_DEVICES"]),
        (DeviceFacts(nvidia_driver=True, cuda="13.0"), ["NVIDIA", "sees no GPU", "CUDA_VISIBLE_DEVICES"]),
        (DeviceFacts(amd_driver=True, cuda="13.0"), ["AMD", "built without ROCm"]),
    ],
)
def test_gpu_that_torch_cannot_use_is_noted_with_the_remedy(facts: DeviceFacts, words: list[str]) -> None:
    device = detect(facts)
    assert device.capabilities.arch == "cpu"
    assert len(device.notes) == 1
    assert [word for word in words if word not in device.notes[0]] == []


def pretend(monkeypatch: pytest.MonkeyPatch, properties: list[SimpleNamespace], *, hip: str | None) -> Device:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", None if hip else "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(properties))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(properties))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
    return detect(gather_facts())


def test_facts_are_read_from_a_rocm_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On ROCm torch's `major` and `minor` are no compute capability: only gcnArchName counts."""
    mi355x = SimpleNamespace(
        name="AMD Instinct MI355X", gcnArchName="gfx950:sramecc+:xnack-", major=9, minor=5, total_memory=288 * 2**30
    )
    device = pretend(monkeypatch, [mi355x, mi355x], hip="7.0.1")
    assert (device.capabilities.arch, device.name, device.count) == ("gfx950", "AMD Instinct MI355X", 2)
    assert device.memory_bytes == 288 * 2**30
    assert device.notes == ()


def test_facts_are_read_from_a_cuda_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    h200, a100 = (
        SimpleNamespace(name=name, major=major, minor=0, total_memory=2**37)
        for name, major in (("NVIDIA H200", 9), ("NVIDIA A100", 8))
    )
    device = pretend(monkeypatch, [h200, a100], hip=None)
    assert (device.capabilities.arch, device.count) == ("sm90", 2)
    assert "sm80" in device.notes[0]


def test_facts_of_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pretend(monkeypatch, [], hip=None).capabilities.arch == "cpu"
