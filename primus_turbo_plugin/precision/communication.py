"""`Communication`: what a user chooses about collectives."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.precision.vocabulary import check_choice, check_keys, nearest

TRANSPORTS = ("auto", "sdma", "process_group", "shared_memory")
LAYERS: tuple[str, ...] = (
    "qkv",
    "proj",
    "fc1",
    "fc2",
    "linear_mlp",
    "mtp_eh_proj",
    "q_proj",
    "q_down_proj",
    "q_up_proj",
)
LAYERS += ("qkv_down_proj", "kv_down_proj", "kv_up_proj")
"""Megatron's `tp_comm_buffer_name` of the linears that its own specs build, 0.16 to 0.19."""
_MAX_CHUNKS = 4
_SWITCHES = ("ring", "gather", "scatter", "bulk_gather", "bulk_scatter", "scatter_dgrad")


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """Overlap of tensor-parallel collectives with GEMMs, under sequence parallelism.

    Attributes:
        tp_overlap: Whether to; None leaves it to Megatron's `--tp-comm-overlap`.
        transport: Who moves the data. `auto`: `sdma` on GPUs of one node, `shared_memory` on CPU processes of one machine; where
            that refuses, `process_group`.
        min_gemm_ms: GEMMs expected to be shorter are not overlapped; None takes the device's measured limit.
        chunks: Pieces that each rank's rows are cut into, 1 to 4; None takes what measured costs say.
        ring: Rows travel between neighbours only, for machines whose GPUs do not all see each other.
        gather: All-gathers in front of a GEMM: fprop of column-parallel layers, dgrad of row-parallel ones.
        scatter: Reduce-scatters behind a GEMM: fprop of row-parallel layers.
        bulk_gather: The all-gather of x for wgrad, under dgrad of column-parallel layers.
        bulk_scatter: The reduce-scatter of dx, under wgrad of column-parallel layers.
        scatter_dgrad: That reduce-scatter behind dgrad, chunk by chunk, instead.
        except_for: Megatron's names of layers that do not overlap, from `LAYERS`.

    Raises:
        ConfigError: A value is impossible.
    """

    tp_overlap: bool | None = None
    transport: str = "auto"
    min_gemm_ms: float | None = None
    chunks: int | None = None
    ring: bool = False
    gather: bool = True
    scatter: bool = True
    bulk_gather: bool = True
    bulk_scatter: bool = True
    scatter_dgrad: bool = False
    except_for: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choice("communication.transport", self.transport, TRANSPORTS)
        if self.tp_overlap not in (None, True, False):
            raise ConfigError(f"communication.tp_overlap: must be true, false or left out; got {self.tp_overlap!r}")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"communication.{name}: must be true or false; got {getattr(self, name)!r}")
        limit = self.min_gemm_ms
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0):
            raise ConfigError(f"communication.min_gemm_ms: must be a time in ms, at least 0; got {limit!r}")
        count = self.chunks
        if count is not None and (
            isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MAX_CHUNKS
        ):
            raise ConfigError(f"communication.chunks: must be 1 to {_MAX_CHUNKS}; got {count!r}")
        if not all(isinstance(name, str) and name for name in self.except_for):
            raise ConfigError(
                f"communication.except_for: must be names such as qkv or fc1; got {list(self.except_for)!r}"
            )
        for name in self.except_for:
            if name not in LAYERS:
                hint = nearest(name.rpartition(".")[2].removeprefix("linear_"), LAYERS)
                raise ConfigError(
                    f"communication.except_for: must name layers as Megatron names their buffers ({', '.join(LAYERS)}); "
                    f"got {name!r}{hint}"
                )

    @classmethod
    def from_value(cls, value: Any, *, where: str = "communication") -> Communication:
        """From YAML: a mapping of the fields, or `true` / `false` for `tp_overlap` alone.

        Raises:
            ConfigError: A key is unknown or a value impossible.
        """
        if isinstance(value, bool):
            return cls(tp_overlap=value)
        check_keys(where, value, [field.name for field in fields(cls)])
        given = dict(value)
        if "except_for" in given:
            names = given["except_for"]
            given["except_for"] = (names,) if isinstance(names, str) else tuple(names or ())
        return cls(**given)

    def to_value(self) -> dict[str, Any]:
        """The inverse of `from_value`: what differs from the defaults."""
        default, plain = Communication(), {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value != getattr(default, field.name):
                plain[field.name] = list(value) if isinstance(value, tuple) else value
        return plain
