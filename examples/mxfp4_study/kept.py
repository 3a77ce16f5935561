"""Finished runs as small files that can be kept in a repository, so that a study grows over machines that forget everything.

A file a run: what `curve.json` says, the curve by columns, training losses and gradient norms rounded; validation losses, which
the tables are made of, as they were.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def restore(folder: Path, out: Path) -> int:
    """Puts the runs kept in `folder` where a study's own are, unless it has them; returns how many are kept."""
    found = sorted(folder.glob("*.json"))
    for path in found:
        run = out / "runs" / path.stem
        if not (run / "curve.json").exists():
            run.mkdir(parents=True, exist_ok=True)
            (run / "curve.json").write_text(json.dumps(_expanded(json.loads(path.read_text()))))
    return len(found)


def keep(out: Path, folder: Path) -> None:
    """Adds the study's finished runs to `folder`; what is kept there stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted((out / "runs").glob("*/curve.json")):
        kept = folder / f"{path.parent.name}.json"
        if not kept.exists():
            kept.write_text(json.dumps(_compact(json.loads(path.read_text())), separators=(",", ":")) + "\n")


def _compact(report: dict[str, Any]) -> dict[str, Any]:
    curve = report["curve"]
    columns = {
        "train": [round(point["train"], 4) for point in curve],
        "grad_norm": [round(point["grad_norm"], 3) for point in curve],
        "validation": {str(point["step"]): point["validation"] for point in curve if "validation" in point},
    }
    return {**report, "seconds": round(report["seconds"], 1), "curve": columns}


def _expanded(report: dict[str, Any]) -> dict[str, Any]:
    columns = report["curve"]
    curve: list[dict[str, float]] = [
        {"step": step, "train": train, "grad_norm": norm}
        for step, (train, norm) in enumerate(zip(columns["train"], columns["grad_norm"], strict=True), 1)
    ]
    for step, loss in columns["validation"].items():
        curve[int(step) - 1]["validation"] = loss
    return {**report, "curve": curve}
