"""The linears of Llama-3 8B and 70B whose collectives are benchmarked, sharded over some number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Shapes:
    """What is measured on so many ranks.

    Attributes:
        gathers: (K, N / ranks) of AG(x) @ w.T.
        scatters: (K / ranks, N) of RS(x @ w.T).
        bulks: (hidden, N of the GEMM above the transfer).
    """

    gathers: tuple[tuple[int, int], ...]
    scatters: tuple[tuple[int, int], ...]
    bulks: tuple[tuple[int, int], ...]


_ON_TWO = (
    Shapes(  # as over two ranks and, on the same two, as over eight: about TP=8's ratio of compute to communication
        gathers=((4096, 14336), (8192, 5120), (8192, 1280), (4096, 3584), (8192, 7168)),
        scatters=((7168, 4096), (4096, 8192), (3584, 8192), (1792, 4096)),
        bulks=((8192, 1280), (4096, 3584), (8192, 5120)),
    )
)
_COLUMN = ((4096, 28672), (8192, 10240), (8192, 57344))  # (K, N): 8B fc1, 70B qkv, 70B fc1
_ROW = ((14336, 4096), (8192, 8192), (28672, 8192))  # 8B fc2, 70B proj, 70B fc2


def shapes_of(ranks: int) -> Shapes:
    """Those of two ranks as they were first measured; of more, the real shards."""
    if ranks <= 2:
        return _ON_TWO
    columns = tuple((k, n // ranks) for k, n in _COLUMN)
    return Shapes(columns, tuple((k // ranks, n) for k, n in _ROW), columns[:2])
