"""The study's pictures: loss gap over tokens, weight gradients' errors, outliers before and after rotation."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from examples.mxfp4_study.results import Runs, gaps


def draw_gaps(runs: Runs, picture: Path) -> None:
    """Validation-loss gap to BF16 of the same seed: over tokens, mean over seeds with their range, and each seed's at the end."""
    plt = _pyplot()
    figure, (axes, ends) = plt.subplots(1, 2, figsize=(13, 5), dpi=90, gridspec_kw={"width_ratios": [3, 2]})
    names = [cell for cell in runs if cell != "bf16" and set(runs[cell]) & set(runs["bf16"])]
    for place, cell in enumerate(names):
        seeds = sorted(set(runs[cell]) & set(runs["bf16"]))
        curves = [gaps(runs[cell][seed], runs["bf16"][seed]) for seed in seeds]
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        identity = runs[cell][seeds[0]]["identity"]
        tokens = [step * identity["batch"] * identity["size"]["seq"] / 1e6 for step in steps]
        (line,) = axes.plot(tokens, [statistics.fmean(c[s] for c in curves) for s in steps], label=cell, linewidth=1.6)
        low, high = ([pick(c[s] for c in curves) for s in steps] for pick in (min, max))
        axes.fill_between(tokens, low, high, color=line.get_color(), alpha=0.12)
        ends.plot([curve[steps[-1]] for curve in curves], [place] * len(curves), "o", color=line.get_color(), alpha=0.7)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="million tokens", ylabel="validation loss minus BF16's (nats a token)", title="Loss gap to BF16")
    if names:
        axes.legend(fontsize=7)
    ends.axvline(0, color="black", linewidth=0.8)
    ends.set(yticks=range(len(names)), yticklabels=names, xlabel="gap at the end (nats), a dot a seed")
    ends.invert_yaxis()
    figure.tight_layout()
    figure.savefig(picture)
    plt.close(figure)


def draw_statistics(rows: list[dict[str, Any]], errors: Path, outliers: Path) -> None:
    """Wgrad's error and what gets through of the quiet tokens, by stabiliser; crest of the blocks before and after rotation."""
    plt = _pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.5), dpi=90)
    titles = {"error": "relative error of dw", "quiet": "share of the quiet half's dw that gets through"}
    for axes, (kind, title) in zip(panels, titles.items()):
        for key in (key for key in rows[0] if key.startswith(f"{kind} ")):
            axes.plot([row[key] for row in rows], ".-", label=key.removeprefix(f"{kind} "), linewidth=1)
        axes.set(xlabel="linear, first layer to last", ylabel=title, title="Wgrad in MXFP4")
        axes.legend()
    figure.tight_layout()
    figure.savefig(errors)
    plt.close(figure)
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), dpi=90)
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
