"""The table of devices is consistent, and complete for every architecture the package speaks about."""

from __future__ import annotations

import pytest

from primus_turbo_plugin.devices import CAPABILITIES, FORMATS, capabilities_of
from primus_turbo_plugin.precision.formats import Format

GPUS = [arch for arch in CAPABILITIES if arch != "cpu"]


def test_table_has_a_row_for_every_architecture_of_the_project() -> None:
    assert set(CAPABILITIES) == {"cpu", "sm80", "sm90", "sm100", "gfx942", "gfx950", "gfx1250"}
    assert all(row.arch == arch and row.known for arch, row in CAPABILITIES.items())


def test_formats_are_those_of_the_precision_layer() -> None:
    """devices lies below precision and cannot import it; this keeps the two lists equal."""
    assert set(FORMATS) == {item.value for item in Format}


@pytest.mark.parametrize("arch", CAPABILITIES)
def test_row_is_consistent(arch: str) -> None:
    row = CAPABILITIES[arch]
    assert set(row.native_formats) <= set(FORMATS)
    assert "bf16" in row.native_formats
    assert ("fp8" in row.native_formats) == (row.fp8_encoding == "ocp")
    assert (row.lds_bytes, row.wave_size, row.torch_device) == (0, 0, "cpu") or arch != "cpu"
    assert row.lds_bytes % 1024 == 0
    assert row.lds_bytes >= 64 * 1024 or arch == "cpu"
    assert row.wave_size in (32, 64) or arch == "cpu"
    assert row.vendor == ("cpu" if arch == "cpu" else "amd" if arch.startswith("gfx") else "nvidia")
    assert row.tensor_dma in ((None, "TDM") if row.vendor == "amd" else (None, "TMA"))


@pytest.mark.parametrize("arch", GPUS)
def test_published_peak_has_a_source_and_halves_with_each_wider_format(arch: str) -> None:
    assert CAPABILITIES[arch].peaks
    for peak in CAPABILITIES[arch].peaks:
        assert peak.source
        assert peak.product
        figures = dict(peak.tflops)
        assert set(figures) <= set(FORMATS)
        for wide, narrow in (("bf16", "fp8"), ("mxfp8", "mxfp4")):
            if wide in figures and narrow in figures:
                assert figures[narrow] / figures[wide] == pytest.approx(2.0, rel=0.02)
        if "fp8" in figures and "mxfp8" in figures:
            assert figures["fp8"] == figures["mxfp8"]


# From the AMD ISA guides and LLVM's feature sets, written down a second time: a slip in the table is a slip in every report.
@pytest.mark.parametrize(
    ("arch", "wave_size", "lds_kib", "tdm", "transpose_loads", "fp4", "fp8"),
    [
        ("gfx942", 64, 64, False, False, False, "fnuz"),
        ("gfx950", 64, 160, False, True, True, "ocp"),
        ("gfx1250", 32, 320, True, True, True, "ocp"),
    ],
)
def test_amd_rows_say_what_the_isa_guides_say(
    arch: str, wave_size: int, lds_kib: int, tdm: bool, transpose_loads: bool, fp4: bool, fp8: str
) -> None:
    row = CAPABILITIES[arch]
    assert (row.wave_size, row.lds_bytes) == (wave_size, lds_kib * 1024)
    assert (row.tensor_dma == "TDM", row.transpose_loads, row.fp4_conversion) == (tdm, transpose_loads, fp4)
    assert row.fp8_encoding == fp8
    assert ("mxfp4" in row.native_formats, "mxfp8" in row.native_formats) == (fp4, fp4)
    assert row.direct_to_lds


@pytest.mark.parametrize(
    ("arch", "native"),
    [
        ("cpu", {"bf16"}),
        ("sm80", {"bf16"}),
        ("sm90", {"bf16", "fp8"}),
        ("sm100", {"bf16", "fp8", "mxfp8", "mxfp4"}),
        ("gfx942", {"bf16"}),
        ("gfx950", {"bf16", "fp8", "mxfp8", "mxfp4"}),
        ("gfx1250", {"bf16", "fp8", "mxfp8", "mxfp4"}),
    ],
)
def test_emulation_has_a_reason_exactly_where_there_are_no_units(arch: str, native: set[str]) -> None:
    for name in FORMATS:
        reason = CAPABILITIES[arch].emulation(name)
        assert (reason is None) == (name in native)
        assert reason is None or arch in reason


def test_reason_tells_another_encoding_from_missing_units() -> None:
    assert "FNUZ" in str(CAPABILITIES["gfx942"].emulation("fp8"))
    assert "no MXFP4 matrix units" in str(CAPABILITIES["gfx942"].emulation("mxfp4"))


@pytest.mark.parametrize(
    ("arch", "vendor", "wave_size"), [("gfx90a", "amd", 64), ("gfx1201", "amd", 32), ("sm120", "nvidia", 32)]
)
def test_unknown_architecture_is_described_cautiously_and_marked(arch: str, vendor: str, wave_size: int) -> None:
    row = capabilities_of(arch)
    assert (row.known, row.vendor, row.wave_size, row.native_formats) == (False, vendor, wave_size, ("bf16",))
    assert (row.peaks, row.tensor_dma) == ((), None)
    assert f"{arch} is not in this package's table" in str(row.emulation("mxfp8"))
