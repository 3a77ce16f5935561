"""A tiny GPT as a Megatron command line, for tests."""

from __future__ import annotations

from typing import Any

_VALUES: dict[str, Any] = {
    "device": "cpu",
    "num-layers": 2,
    "hidden-size": 64,
    "ffn-hidden-size": 128,
    "num-attention-heads": 4,
    "num-query-groups": 2,
    "seq-length": 32,
    "max-position-embeddings": 32,
    "micro-batch-size": 2,
    "global-batch-size": 8,
    "train-iters": 3,
    "lr": 3e-3,
    "lr-decay-style": "constant",
    "normalization": "RMSNorm",
    "position-embedding-type": "rope",
    "hidden-dropout": 0.0,
    "attention-dropout": 0.0,
    "tokenizer-type": "NullTokenizer",
    "vocab-size": 256,
    "split": "90,10,0",
    "eval-interval": 100,
    "eval-iters": 1,
    "log-interval": 1,
}
_SWITCHES = (
    "swiglu",
    "disable-bias-linear",
    "untie-embeddings-and-output-weights",
    "group-query-attention",
    "bf16",
    "mock-data",
)


def tiny_gpt(*more: str, drop: tuple[str, ...] = (), **changed: Any) -> list[str]:
    """The command line; `changed` replaces values (`hidden_size=32`), `drop` leaves switches out."""
    values = {**_VALUES, **{name.replace("_", "-"): value for name, value in changed.items()}}
    argv = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    return [*argv, *(f"--{name}" for name in _SWITCHES if name not in drop), *more]
