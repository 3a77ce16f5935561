"""From the curves of finished runs to the study's table, with confidence intervals over seeds, and its pictures.

gap        validation loss of the cell minus that of BF16 with the same seed, at the end: paired, as both saw the same batches
extra      tokens the cell needs to reach the loss that BF16 has at 60 % of the run (before the rate falls), over BF16's, minus 1
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

_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""97.5 % quantile of Student's t with 1, 2, ... degrees of freedom; 1.96 beyond."""
_TARGET = 0.6
Runs = dict[str, dict[int, dict[str, Any]]]
"""Cell -> seed -> what `train.Run` wrote."""


def load(out: Path) -> Runs:
    """All finished runs below a study's folder."""
    runs: Runs = defaultdict(dict)
    for path in sorted((out / "runs").glob("*/curve.json")):
        report = json.loads(path.read_text())
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

    Too short: the baseline has no evaluation between its first and the one at 60 %, so there is no line to read tokens off.
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
                "ended_in_nan": sum(math.isinf(final_loss(report)) for report, _ in pairs),
                "same_as": " ".join(reports[seeds[0]]["same_as"]),
            }
        )
    order = {name: number for number, name in enumerate(_order())}
    return sorted(rows, key=lambda row: order.get(row["cell"], len(order)))


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table as a document has it."""
    lines = ["| recipe | seeds | validation loss | gap to BF16 | extra tokens |", "|---|---|---|---|---|"]
    for row in rows:
        gap = _with_interval(row["gap"], row["gap_ci95"], "{:+.4f}")
        extra = _with_interval(100 * row["extra_tokens"], 100 * row["extra_tokens_ci95"], "{:+.1f}") + " %"
        if not math.isfinite(row["extra_tokens"]):
            extra = "too short" if math.isnan(row["extra_tokens"]) else "not reached"
        lines.append(f"| `{row['cell']}` | {row['seeds']} | {row['loss']:.4f} | {gap} | {extra} |")
    return "\n".join(lines) + "\n"


def _with_interval(mean: float, width: float, form: str) -> str:
    return form.format(mean) + ("" if math.isnan(width) else " ± " + form.format(width).lstrip("+"))


def _order() -> list[str]:
    from examples.mxfp4_study.grid import cells

    return [cell.name for cell in cells()]


def draw_gaps(runs: Runs, picture: Path) -> None:
    """Validation-loss gap to BF16 of the same seed, over tokens, mean over seeds with their range."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(9, 5.5), dpi=120)
    for cell, reports in runs.items():
        seeds = sorted(set(reports) & set(runs["bf16"]))
        if cell == "bf16" or not seeds:
            continue
        curves = [_gap(reports[seed], runs["bf16"][seed]) for seed in seeds]
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        identity = reports[seeds[0]]["identity"]
        tokens = [step * identity["batch"] * identity["size"]["seq"] / 1e6 for step in steps]
        (line,) = axes.plot(tokens, [statistics.fmean(c[s] for c in curves) for s in steps], label=cell, linewidth=1.6)
        low, high = ([pick(c[s] for c in curves) for s in steps] for pick in (min, max))
        axes.fill_between(tokens, low, high, color=line.get_color(), alpha=0.12)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="million tokens", ylabel="validation loss minus BF16's (nats a token)", title="Loss gap to BF16")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(picture)
    plt.close(figure)


def _gap(report: dict[str, Any], baseline: dict[str, Any]) -> dict[int, float]:
    base = validation(baseline)
    return {step: loss - base[step] for step, loss in validation(report).items() if step in base}


def draw_statistics(rows: list[dict[str, Any]], errors: Path, outliers: Path) -> None:
    """Wgrad's relative error by linear and stabiliser; crest of the blocks before and after rotation."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(10, 4.5), dpi=120)
    for key in (key for key in rows[0] if key.startswith("error ")):
        axes.plot([row[key] for row in rows], ".-", label=key.removeprefix("error "), linewidth=1)
    axes.set(xlabel="linear, first layer to last", ylabel="relative error of dw", title="Wgrad in MXFP4")
    axes.legend()
    figure.tight_layout()
    figure.savefig(errors)
    plt.close(figure)
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), dpi=120)
    for axes, name in zip(panels, ("x", "dy")):
        for size in (0, 16, 32):
            label = f"H{size}" if size else "not rotated"
            axes.plot([row[f"{name} H{size} crest p99"] for row in rows], ".-", label=label, linewidth=1)
        axes.set(xlabel="linear, first layer to last", ylabel="amax / rms of a block, 99th percentile", title=name)
        axes.legend()
    figure.tight_layout()
    figure.savefig(outliers)
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
