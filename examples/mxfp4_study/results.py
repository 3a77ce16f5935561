"""From the curves of finished runs to the study's tables, with confidence intervals over seeds.

gap        validation loss of the cell minus that of BF16 with the same seed, at the end: paired, as both saw the same batches
extra      tokens the cell needs to reach the loss that BF16 has at half of the run (before the rate falls), over BF16's, minus 1
spike      a step after the warm-up whose training loss exceeds the median of the 50 before it by more than 8 of their standard
           deviations (from the median absolute deviation): the batch was hard, or the run jumped
contrast   difference of two cells with the same seed, at the end; resolved if its interval leaves out zero
interval   mean +- t(97.5 %, seeds - 1) * standard deviation / sqrt(seeds); none with a single seed
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from primus_turbo_plugin.errors import ConfigError

_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""97.5 % quantile of Student's t with 1, 2, ... degrees of freedom; 1.96 beyond."""
_TARGET = 0.5
_SPIKE_WINDOW, _SPIKE_DEVIATIONS = 50, 8.0
_FULL = "fprop+dgrad+wgrad"
_NONE, _SR, _RH16, _H16, _H32 = (f"{_FULL}.{name}.wgrad" for name in ("none", "sr", "rh16", "h16", "h32"))
CONTRASTS = (
    ("dgrad in FP4 less dgrad in BF16", "fprop+dgrad.none.wgrad", "fprop.none.wgrad"),
    ("wgrad in FP4 without stabiliser less wgrad in BF16", _NONE, "fprop+dgrad.none.wgrad"),
    ("wgrad in FP4 with H16 less wgrad in BF16", _H16, "fprop+dgrad.none.wgrad"),
    ("H16 less none", _H16, _NONE),
    ("stochastic rounding less none", _SR, _NONE),
    ("H16 behind random signs less none", _RH16, _NONE),
    ("H16 less stochastic rounding", _H16, _SR),
    ("H16 less H16 behind random signs", _H16, _RH16),
    ("H32 less H16", _H32, _H16),
)
"""What, cell, less which cell."""
Runs = dict[str, dict[int, dict[str, Any]]]
"""Cell -> seed -> what `train.Run` wrote."""


def load(out: Path) -> Runs:
    """All finished runs below a study's folder.

    Raises:
        ConfigError: They differ in settings or text.
    """
    runs: Runs = defaultdict(dict)
    first: dict[str, Any] = {}
    for path in sorted((out / "runs").glob("*/curve.json")):
        report = json.loads(path.read_text())
        identity = report["identity"]
        first = first or identity
        if identity != first:
            different = sorted(key for key in identity | first if identity.get(key) != first.get(key))
            raise ConfigError(
                f"{path}: was made with another {', '.join(different)} than the runs beside it. "
                "Only runs of the same settings and text are compared: move it to a folder of its own."
            )
        runs[report["cell"]][report["seed"]] = report
    return dict(runs)


def validation(report: dict[str, Any]) -> dict[int, float]:
    """Step -> validation loss."""
    return {int(point["step"]): point["validation"] for point in report["curve"] if "validation" in point}


def final_loss(report: dict[str, Any]) -> float:
    """The last validation loss; infinite if the run ended in NaN."""
    if report["curve"][-1]["step"] < report["identity"]["steps"]:
        return math.inf
    last = list(validation(report).values())[-1]
    return last if math.isfinite(last) else math.inf


def tokens_to(report: dict[str, Any], loss: float) -> float:
    """Tokens until the validation loss first falls to `loss`, between evaluations by a straight line; infinite if never."""
    tokens = report["identity"]["batch"] * report["identity"]["size"]["seq"]
    points = list(validation(report).items())
    for (step, before), (after_step, after) in itertools.pairwise(points):
        if after <= loss:
            share = 0.0 if before <= loss else (before - loss) / (before - after)
            return tokens * (step + share * (after_step - step))
    return math.inf


def extra_tokens(report: dict[str, Any], baseline: dict[str, Any]) -> float:
    """Share of tokens needed beyond the baseline's; infinite if its loss was not reached, NaN if the runs are too short.

    Too short: the baseline has no evaluation between its first and the one at half, so there is no line to read tokens off.
    """
    steps = baseline["identity"]["steps"]
    curve = validation(baseline)
    target = curve[min(curve, key=lambda step: abs(step - _TARGET * steps))]
    needed = tokens_to(baseline, target)
    return tokens_to(report, target) / needed - 1.0 if math.isfinite(needed) else math.nan


def interval(values: list[float]) -> tuple[float, float]:
    """(mean, half width of the 95 % interval); NaN width with one value, infinite mean if any is."""
    mean = statistics.fmean(values)
    if len(values) < 2 or not math.isfinite(mean):
        return mean, math.nan
    t = _T[len(values) - 2] if len(values) - 2 < len(_T) else 1.96
    return mean, t * statistics.stdev(values) / math.sqrt(len(values))


def gaps(report: dict[str, Any], baseline: dict[str, Any]) -> dict[int, float]:
    """Step -> validation loss less the baseline's."""
    base = validation(baseline)
    return {step: loss - base[step] for step, loss in validation(report).items() if step in base}


def spikes(report: dict[str, Any]) -> int:
    """How many steps after the warm-up stand out of the 50 before them."""
    losses = [point["train"] for point in report["curve"]]
    first = max(_SPIKE_WINDOW, round(report["identity"].get("warmup", 0.0) * report["identity"]["steps"]))
    found = 0
    for step in range(first, len(losses)):
        window = losses[step - _SPIKE_WINDOW : step]
        middle = statistics.median(window)
        deviation = 1.4826 * statistics.median(abs(loss - middle) for loss in window)
        found += not losses[step] <= middle + _SPIKE_DEVIATIONS * deviation
    return found


def contrasts(runs: Runs) -> list[dict[str, Any]]:
    """One row a difference of `CONTRASTS` of which seeds are there."""
    rows = []
    for name, cell, other in CONTRASTS:
        seeds = sorted(set(runs.get(cell, {})) & set(runs.get(other, {})))
        if seeds:
            values = [final_loss(runs[cell][seed]) - final_loss(runs[other][seed]) for seed in seeds]
            mean, width = interval(values)
            rows.append({"contrast": name, "seeds": len(seeds), "difference": mean, "ci95": width, "by_seed": values})
    return rows


def table(runs: Runs) -> list[dict[str, Any]]:
    """One row a cell that shares a seed with BF16."""
    rows = []
    for cell, reports in runs.items():
        seeds = sorted(set(reports) & set(runs.get("bf16", {})))
        if not seeds:
            continue
        pairs = [(reports[seed], runs["bf16"][seed]) for seed in seeds]
        gap, gap_width = interval([final_loss(report) - final_loss(base) for report, base in pairs])
        extra, extra_width = interval([extra_tokens(report, base) for report, base in pairs])
        rows.append(
            {
                "cell": cell,
                "seeds": len(seeds),
                "loss": statistics.fmean(final_loss(report) for report, _ in pairs),
                "gap": gap,
                "gap_ci95": gap_width,
                "extra_tokens": extra,
                "extra_tokens_ci95": extra_width,
                "spikes": sum(spikes(report) for report, _ in pairs),
                "ended_in_nan": sum(math.isinf(final_loss(report)) for report, _ in pairs),
                "same_as": " ".join(reports[seeds[0]]["same_as"]),
            }
        )
    order = {name: number for number, name in enumerate(_order())}
    return sorted(rows, key=lambda row: order.get(row["cell"], len(order)))


def each_run(runs: Runs) -> list[dict[str, Any]]:
    """One row a run: what the table's means and intervals are made of."""
    return [
        {
            "cell": cell,
            "seed": seed,
            "steps": report["curve"][-1]["step"],
            "validation_loss": final_loss(report),
            "spikes": spikes(report),
            "largest_grad_norm": max(point["grad_norm"] for point in report["curve"]),
            "device": report["device"],
            "torch": report["torch"],
        }
        for cell, reports in runs.items()
        for seed, report in sorted(reports.items())
    ]


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table as a document has it."""
    lines = ["| recipe | seeds | validation loss | gap to BF16 | extra tokens | spikes |", "|---|---|---|---|---|---|"]
    for row in rows:
        gap = _with_interval(row["gap"], row["gap_ci95"], "{:+.4f}")
        extra = _with_interval(100 * row["extra_tokens"], 100 * row["extra_tokens_ci95"], "{:+.1f}") + " %"
        if not math.isfinite(row["extra_tokens"]):
            extra = "too short" if math.isnan(row["extra_tokens"]) else "not reached"
        if row["cell"] == "bf16":
            gap = extra = ""
        lines.append(f"| `{row['cell']}` | {row['seeds']} | {row['loss']:.4f} | {gap} | {extra} | {row['spikes']} |")
    return "\n".join(lines) + "\n"


def contrasts_markdown(rows: list[dict[str, Any]]) -> str:
    """The contrasts as a document has them."""
    lines = ["| difference of two cells | seeds | validation loss | by seed | |", "|---|---|---|---|---|"]
    for row in rows:
        if not math.isfinite(row["difference"]):
            verdict = "runs ended in NaN"
        elif row["seeds"] == 1:
            verdict = "one seed: no interval"
        else:
            verdict = "resolved" if abs(row["difference"]) > row["ci95"] else "not resolved"
        difference = _with_interval(row["difference"], row["ci95"], "{:+.4f}")
        by_seed = ", ".join(f"{value:+.3f}" for value in row["by_seed"])
        lines.append(f"| {row['contrast']} | {row['seeds']} | {difference} | {by_seed} | {verdict} |")
    return "\n".join(lines) + "\n"


def _with_interval(mean: float, width: float, form: str) -> str:
    return form.format(mean) + ("" if math.isnan(width) else " ± " + form.format(width).lstrip("+"))


def _order() -> list[str]:
    from examples.mxfp4_study.grid import cells

    return [cell.name for cell in cells()]
