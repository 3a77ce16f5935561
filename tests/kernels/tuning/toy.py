"""An op of three sizes that the tests of tuning tune."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from primus_turbo_plugin.kernels.tuning.codec import encode
from primus_turbo_plugin.kernels.tuning.entry import Entry, Versions
from primus_turbo_plugin.kernels.tuning.tunable import Tunable


@dataclass(frozen=True, kw_only=True)
class Side:
    element: str
    aligned: bool = True


@dataclass(frozen=True, kw_only=True)
class ToyKey:
    arch: str
    size: int
    side: Side


@dataclass(frozen=True, kw_only=True)
class ToyConfig:
    block: int
    mode: Literal["a", "b"] = "a"

    def __post_init__(self) -> None:
        if self.block % 2:
            raise ValueError(f"block must be even, got {self.block}")


def refusal(key: ToyKey, config: ToyConfig) -> str | None:
    return "block exceeds size" if config.block > key.size else None


BLOCKS = [2, 4, 8, 16, 32, 64]
TOY = Tunable(
    op="toy",
    version=3,
    key_type=ToyKey,
    config_type=ToyConfig,
    default=lambda key: ToyConfig(block=2),
    candidates=lambda key: [ToyConfig(block=block) for block in BLOCKS if block <= key.size],
    struck_out=lambda key: [(ToyConfig(block=block), "block exceeds size") for block in BLOCKS if block > key.size],
    refusal=refusal,
)


def key(size: int = 16, *, arch: str = "gfx950", element: str = "bf16", aligned: bool = True) -> ToyKey:
    return ToyKey(arch=arch, size=size, side=Side(element=element, aligned=aligned))


def entry(of: ToyKey, block: int, *, versions: Versions | None = None, **fields: object) -> Entry:
    measured = {"device": "toy", "us": 3.5, "default_us": 4.0, "date": "2026-12-01"}
    return Entry(
        op="toy",
        versions=versions or TOY.versions,
        key=encode(of),
        config=encode(ToyConfig(block=block)),
        source="measured",
        **{**measured, **fields},  # type: ignore[arg-type]
    )
