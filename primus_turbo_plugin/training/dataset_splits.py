"""Which parts of an indexed dataset are empty. Megatron would look for samples in them for ever.

Only the index (`PREFIX.idx`) is read: a header of 34 bytes with the number of sequences, then their int32 lengths.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from primus_turbo_plugin.errors import ConfigError

SPLITS = ("training", "validation", "test")
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents
_MAGIC = b"MMIDIDX\x00\x00"
_FEW = 65536


def sequence_lengths(prefix: str) -> Any:
    """Lengths of the dataset's sequences in tokens: int32 `[sequences]`, mapped, not read.

    Raises:
        ConfigError: `PREFIX.idx` is not such an index, or is cut off.
    """
    path = f"{prefix}.idx"
    try:
        with open(path, "rb") as file:
            header = file.read(_HEADER.size)
        magic, version, _, sequences, _ = _HEADER.unpack(header)
        if (magic, version) != (_MAGIC, 1):
            raise ValueError("no indexed dataset of version 1")
        if sequences == 0:
            return np.zeros(0, dtype=np.int32)
        return np.memmap(path, dtype=np.int32, mode="r", offset=_HEADER.size, shape=(sequences,))
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"dataset {prefix}: {path} cannot be read as Megatron's index ({error}).") from error


def empty_splits(lengths: Any, split: str) -> list[str]:
    """Names of the parts that `--split` asks for and that get no token; training is always asked for.

    Args:
        lengths: Of the dataset's sequences, int32 `[sequences]`.
        split: As `--split` takes it, "95,5,0".

    Raises:
        ConfigError: `split` asks for nothing.
    """
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    try:
        ends = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    except (AssertionError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"--split {split}: takes up to three weights, as 95,5,0.") from error
    empty = []
    for name, part in zip(SPLITS, ends, strict=True):
        if part is None:
            if name == SPLITS[0]:
                empty.append(name)
            continue
        first, last = (round(end * float(len(lengths))) for end in part)  # as Megatron rounds
        if not has_tokens(lengths[first:last]):
            empty.append(name)
    return empty


def has_tokens(lengths: Any) -> bool:
    """Whether any sequence is longer than nothing; almost always the first ones say."""
    return bool(np.any(lengths[:_FEW])) or bool(np.any(lengths[_FEW:]))


def check_splits(prefixes: Sequence[str], split: str) -> None:
    """Refuse datasets that are too small for `split`.

    Raises:
        ConfigError: Names dataset, its size and the empty parts.
    """
    for prefix in prefixes:
        lengths = sequence_lengths(prefix)
        empty = empty_splits(lengths, split)
        if empty:
            raise ConfigError(
                f"dataset {prefix}: --split {split} of {len(lengths)} documents leaves nothing for {' and '.join(empty)}. "
                "Use more documents, or another --split; 0 leaves validation or test out."
            )


def check_not_empty(prefixes: Sequence[str]) -> None:
    """Refuse datasets without a token.

    Raises:
        ConfigError: Names the dataset.
    """
    for prefix in prefixes:
        if not has_tokens(sequence_lengths(prefix)):
            raise ConfigError(f"dataset {prefix}: holds no tokens. Write it again, or leave it out.")
