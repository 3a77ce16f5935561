"""The cells of the study as data: which GEMMs run in MXFP4, with which stabiliser, where.

    scope       the GEMMs in MXFP4: `fprop`, `fprop+dgrad`, `fprop+dgrad+wgrad`; the others stay in BF16
    stabiliser  `none`; `sr`: stochastic rounding; `rh16`: H16 behind seeded random signs; `h16`, `h32`: deterministic Hadamard
    placement   where the stabiliser acts, as the package's presets of that name have it:
                `wgrad`: on both operands of wgrad only, weights in 32x32 blocks;  `all`: on every MXFP4 operand, blocks of 1x32

Cells that come to the same recipe (a stabiliser of wgrad that has no FP4 wgrad to act on) are one cell, run once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.presets import GEMM_OPERANDS

SCOPES: dict[str, tuple[str, ...]] = {
    "fprop": ("fprop",),
    "fprop+dgrad": ("fprop", "dgrad"),
    "fprop+dgrad+wgrad": ("fprop", "dgrad", "wgrad"),
}
STABILISERS: dict[str, dict[str, Any]] = {
    "none": {},
    "sr": {"rounding": "stochastic"},
    "rh16": {"hadamard": 16, "random_signs": True},
    "h16": {"hadamard": 16},
    "h32": {"hadamard": 32},
}
PLACEMENTS = ("wgrad", "all")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One recipe of the study.

    Attributes:
        name: For files and tables: `bf16`, `mxfp8`, `fprop+dgrad+wgrad.h16.wgrad`.
        scope: A key of `SCOPES`, or the name for the two baselines.
        stabiliser: A key of `STABILISERS`.
        placement: One of `PLACEMENTS`.
        precision: The `precision` value of a configuration file.
        same_as: Names of the cells that this one stands for too.
    """

    name: str
    scope: str
    stabiliser: str = "none"
    placement: str = ""
    precision: Any = "bf16"
    same_as: tuple[str, ...] = ()

    def config(self, *, seed: int) -> TurboConfig:
        """The configuration that every transformer linear of a run with this seed follows."""
        return TurboConfig.from_dict({"precision": self.precision, "rounding_seed": seed, "signs_seed": seed})


def precision(scope: str, stabiliser: str, placement: str) -> dict[str, Any]:
    """The `precision` mapping of one combination."""
    mapping: dict[str, Any] = {"preset": "bf16"}
    for gemm in SCOPES[scope]:
        acts = placement == "all" or gemm == "wgrad"
        extra = STABILISERS[stabiliser] if acts else {}
        mapping[gemm] = {
            operand: {"format": "mxfp4", "block": _block(operand, placement), **extra}
            for operand in GEMM_OPERANDS[gemm]
        }
    return mapping


def _block(operand: str, placement: str) -> str:
    return "32x32" if operand == "w" and placement == "wgrad" else "1x32"


def cells() -> tuple[Cell, ...]:
    """Every distinct recipe, baselines first, in the order of the study's argument."""
    found: dict[Any, Cell] = {}
    for cell in (
        Cell(name="bf16", scope="bf16"),
        Cell(name="mxfp8", scope="mxfp8", precision="mxfp8"),
        *_combinations(),
    ):
        recipe = cell.config(seed=0).plan("linear").precision
        first = found.setdefault(recipe, cell)
        if first is not cell:
            found[recipe] = _also(first, cell.name)
    return tuple(found.values())


def _combinations() -> list[Cell]:
    return [
        Cell(
            name=f"{scope}.{stabiliser}.{placement}",
            scope=scope,
            stabiliser=stabiliser,
            placement=placement,
            precision=precision(scope, stabiliser, placement),
        )
        for scope in SCOPES
        for placement in PLACEMENTS
        for stabiliser in STABILISERS
    ]


def _also(cell: Cell, name: str) -> Cell:
    return Cell(
        name=cell.name, scope=cell.scope, stabiliser=cell.stabiliser, placement=cell.placement,
        precision=cell.precision, same_as=(*cell.same_as, name),
    )  # fmt: skip


#: The cells that decide the question, for when the device time is short: both baselines, FP4 GEMM by GEMM, and the remedies.
CORE = (
    "bf16", "mxfp8", "fprop.none.wgrad", "fprop+dgrad.none.wgrad", "fprop+dgrad+wgrad.none.wgrad",
    "fprop+dgrad+wgrad.sr.wgrad", "fprop+dgrad+wgrad.rh16.wgrad", "fprop+dgrad+wgrad.h16.wgrad", "fprop+dgrad+wgrad.h32.wgrad",
)  # fmt: skip
