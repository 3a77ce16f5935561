"""The doctor's report as text."""

from __future__ import annotations

from collections import Counter

from primus_turbo_plugin.devices import Device
from primus_turbo_plugin.diagnostics.doctor import Report
from primus_turbo_plugin.diagnostics.inventory import Inventory
from primus_turbo_plugin.diagnostics.report import tuning_rows
from primus_turbo_plugin.diagnostics.selftest import CaseResult, Outcome
from primus_turbo_plugin.diagnostics.tables import section, table
from primus_turbo_plugin.precision.config_sources import ResolvedConfig
from primus_turbo_plugin.precision.presets import SLOTS

Row = tuple[str, str]


def render(report: Report) -> str:
    """The whole report; what is broken comes last, where a terminal shows it."""
    blocks = [
        section("Device", device_rows(report.device)),
        section("Software", software_rows(report.inventory)),
        section("Formats", tuple(report.formats.items())),
        section("Served by", serving_rows(report)),
        section("Tuned configurations", tuning_rows(report.tuning, report.device)),
        section("Configuration", config_rows(report.resolved) if report.resolved else ()),
        section("Environment", [(f"{name}={value}", meaning) for name, value, meaning in report.inventory.variables]),
        section("Notes", [("-", note) for note in report.notes]),
        selftest_lines(report.selftest) if report.selftest is not None else [],
        section("Broken", [("-", str(problem)) for problem in report.problems]),
        [
            "Everything that was asked for can be had."
            if report.is_healthy
            else "Not everything that was asked for can be had."
        ],
    ]
    return "\n".join(line for block in blocks if block for line in [*block, ""]).rstrip()


def device_rows(device: Device) -> list[Row]:
    """What the device is and what it can do."""
    row = device.capabilities
    rows = [("name", f"{device.name}" + (f" x {device.count}" if device.count > 1 else ""))]
    if row.vendor == "cpu":
        return [*rows, ("kind", "cpu: the reference kernels run, at a CPU's speed")]
    features = {
        row.tensor_dma or "tensor DMA": row.tensor_dma is not None,
        "transpose loads": row.transpose_loads,
        "direct-to-LDS copies": row.direct_to_lds,
        "FP4 conversion": row.fp4_conversion,
    }
    have = [name for name, has in features.items() if has]
    lack = [name for name, has in features.items() if not has]
    rows.append(
        ("architecture", f"{row.arch} ({row.family}), waves of {row.wave_size}, LDS {row.lds_bytes // 1024} KiB")
    )
    rows.append(("memory", f"{device.memory_bytes / 2**30:.0f} GiB"))
    rows.append(
        (
            "matrix units",
            ", ".join(row.native_formats) + (f"; FP8 as {row.fp8_encoding.upper()}" if row.fp8_encoding else ""),
        )
    )
    rows.append(("has", ", ".join(have) or "-"))
    rows.append(("lacks", ", ".join(lack) or "-"))
    for peak in row.peaks:
        figures = ", ".join(f"{name} {value:g}" for name, value in peak.tflops)
        rows.append((f"peak of {peak.product}", f"dense TFLOPS: {figures} ({peak.source})"))
    return rows


def software_rows(inventory: Inventory) -> list[Row]:
    """Versions; for what is missing, what it would be for and how to get it."""
    rows = [("primus-turbo-plugin", inventory.package), ("python", f"{inventory.python} on {inventory.platform}")]
    for item in inventory.components:
        missing = f"not installed; for {item.needed_for}: {item.remedy}"
        rows.append((item.name, item.version or missing))
    training = (
        "present"
        if inventory.megatron_training
        else "not in this megatron-core; the entry scripts need it: use 0.19 or later"
    )
    rows.append(("megatron.training", training))
    rows.append(("patches applied", ", ".join(inventory.patches) or "none"))
    return rows


def serving_rows(report: Report) -> list[tuple[str, str, str]]:
    """op, backend, request and whatever is to be said about it."""
    rows = []
    for item in report.served:
        reasons = "; ".join(f"{name} {reason}" for name, reason in item.refusals) if item.backend is None else ""
        mark = " [emulated]" if item.emulated else ""
        said = reasons or item.note
        rows.append((item.op, item.backend or "NOBODY", item.request + mark + (f" ({said})" if said else "")))
    return rows


def config_rows(resolved: ResolvedConfig) -> list[tuple[str, str, str]]:
    """Each key, its value, and who set it; then what each operand gets."""
    origins = dict(resolved.origins)
    rows = [
        (key, origins.get(key, "default"), str(value))
        for key, value in resolved.config.to_dict().items()
        if key != "modules"
    ]
    for override in resolved.config.modules:
        rows.append((f"modules[{override.pattern!r}]", origins.get("modules", ""), str(override.to_value())))
    linear = resolved.config.precision.linear()
    rows += [(f"{gemm} {operand}", "", str(linear.spec(gemm, operand))) for gemm, operand in SLOTS]
    return rows


def selftest_lines(results: tuple[CaseResult, ...]) -> list[str]:
    """A row a kernel with its counts, every failure (and what was cut off) in full, and one line that says how it went."""
    outcomes: tuple[Outcome, ...] = ("passed", "failed", "not claimed", "untested", "not run")
    counts: Counter[tuple[str, str, str]] = Counter((item.op, item.backend, item.outcome) for item in results)
    rows = []
    for op, backend in dict.fromkeys((item.op, item.backend) for item in results):
        of = {outcome: counts[op, backend, outcome] for outcome in outcomes}
        verdict = "FAILED" if of["failed"] else "NOT RUN" if of["not run"] else "ok" if of["passed"] else "-"
        said = [f"{count} {outcome}" for outcome, count in of.items() if count]
        seconds = sum(item.seconds for item in results if (item.op, item.backend) == (op, backend))
        said += [f"{seconds:.0f} s"] if seconds >= 0.5 else []
        rows.append((op, backend, verdict, ", ".join(said)))
    named = {"failed": "failed:", "not run": "not finished:"}  # of those not run, the ones that had begun
    failures = [
        (named[item.outcome], f"{item.op} {item.backend}", item.case, item.detail)
        for item in sorted(results, key=lambda item: item.outcome, reverse=True)
        if item.outcome == "failed" or (item.outcome == "not run" and item.seconds)
    ]
    total = Counter(item.outcome for item in results)
    summary = ", ".join(f"{total[outcome]} {outcome}" for outcome in outcomes if total[outcome])
    verdict = "FAILED" if total["failed"] else "INCOMPLETE" if total["not run"] else "all that ran passed"
    return [
        *section("Self-test", rows),
        *table(failures),
        f"  self-test: {verdict}: {summary}",
    ]
