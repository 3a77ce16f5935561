"""The Hopper attention kernels compiled for sm_90 on any machine: they compile, and nothing spills.

What they compute is tested where there is a Hopper GPU (test_attention.py).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="compiling needs triton, which is not installed")

import triton

from primus_turbo_plugin.kernels.triton import attention_hopper as hopper
from primus_turbo_plugin.kernels.triton.attention_launch import Launch, Problem, key_slots, query_slots

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
LENGTHS = torch.zeros(9, dtype=torch.int32)
PROBLEMS = {
    "causal": Problem(scale=0.1, right=0),
    "window": Problem(scale=0.1, left=1000, right=0),
    "packed": Problem(scale=0.1, right=0, cu_q=LENGTHS, starts_q=LENGTHS, cu_k=LENGTHS, starts_k=LENGTHS),
    "zig-zag": Problem(scale=0.1, right=0, cp_rank=1, cp_size=2),
    "packed zig-zag": Problem(
        scale=0.1, right=0, cu_q=LENGTHS, starts_q=LENGTHS, cu_k=LENGTHS, starts_k=LENGTHS, cp_rank=1, cp_size=2
    ),
}
LARGEST_SHARED_MEMORY = 227 * 1024


def _launch(kind: str, problem: Problem, dim: int = 128) -> Launch:
    q, k = (torch.empty(4096, 1, n, dim, dtype=torch.bfloat16).transpose(0, 1) for n in (8, 2))
    v_dim = 128 if dim == 192 else dim
    v, out = (torch.empty(4096, 1, n, v_dim, dtype=torch.bfloat16).transpose(0, 1) for n in (2, 8))
    rows = torch.empty(1, 8, 4096)
    if kind == "forward":
        return hopper.forward_launch(q, k, v, out, rows, problem)
    if kind == "dkdv":
        return hopper.dkdv_launch(q, k, v, out, k[None], v[None], rows, rows, problem)
    return hopper.dq_launch(q, k, v, out, q, rows, rows, problem)


def _compile(step: Launch) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    types = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32"}
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for index, name in enumerate(step.kernel.arg_names):
        value = step.constants.get(name, step.args.get(name))
        if name in step.constants or value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + types[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = f"tensordesc<{types[value.base.dtype]}{value.block_shape},{value.layout!r}>"
    source = GluonASTSource(step.kernel, signature, constants, attributes)
    options = step.options | {"ptx_version": 86}  # what each release's ptxas for Hopper can read
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize(
    ("kind", "problem", "dim"),
    [
        ("forward", "causal", 128), ("forward", "window", 192), ("forward", "packed", 256),
        ("dkdv", "causal", 128), ("dkdv", "packed", 192), ("dkdv", "causal", 256),
        ("dkdv", "packed", 128), ("dkdv", "zig-zag", 64), ("dkdv", "packed zig-zag", 128),
        ("dq", "causal", 128), ("dq", "packed", 192), ("dq", "causal", 256),
    ],
)  # fmt: skip
def test_compiles_without_spills(kind: str, problem: str, dim: int, tmp_path: Path) -> None:
    """What a tile's beginning and end may spill outside of the loop over its blocks is let pass: 64 bytes."""
    if not PTXAS.is_file():
        pytest.skip("this triton comes without ptxas")
    compiled = _compile(_launch(kind, PROBLEMS[problem], dim))
    assert compiled.metadata.shared <= LARGEST_SHARED_MEMORY
    ptx = compiled.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor.4d" in ptx
    # lse and delta: one that starts inside 16 bytes, as sequences do, is an illegal instruction.
    assert ("cp.async.bulk.tensor.2d" in ptx) == (kind == "dkdv" and problem == "causal")
    (tmp_path / "kernel.ptx").write_text(ptx)
    command = [PTXAS, "-v", "--gpu-name", "sm_90a", tmp_path / "kernel.ptx", "-o", tmp_path / "kernel.cubin"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", result.stderr)]
    assert spilled
    assert max(spilled) <= 64, result.stderr
    assert "serialized" not in result.stderr  # ptxas says so where it cannot let products run on


class _HostPointer:
    """A pointer into a list, as far as index arithmetic goes."""

    def __init__(self, values: list[int], place: int = 0) -> None:
        self.values, self.place = values, place

    def __add__(self, offset: int) -> _HostPointer:
        return _HostPointer(self.values, self.place + offset)


class _HostLanguage:
    """What the index arithmetic of the kernels uses of the device language, on Python integers."""

    minimum = staticmethod(min)
    maximum = staticmethod(max)

    @staticmethod
    def where(condition: bool, yes: int, no: int) -> int:
        return yes if condition else no

    @staticmethod
    def load(pointer: _HostPointer) -> int:
        return pointer.values[pointer.place]


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Index arithmetic of attention_hopper_pieces.py, by name, as Python functions."""
    from primus_turbo_plugin.kernels.triton import attention_hopper_pieces, attention_tile

    monkeypatch.setattr(attention_hopper_pieces, "gl", _HostLanguage)
    monkeypatch.setattr(attention_tile, "tl", _HostLanguage)
    for name in ("query_piece", "find_sequence", "query_blocks", "query_run", "turn"):
        monkeypatch.setattr(attention_hopper_pieces, name, getattr(attention_hopper_pieces, name).fn)
    return lambda name: getattr(getattr(attention_hopper_pieces, name), "fn", getattr(attention_hopper_pieces, name))


def test_blocks_and_masks_cover_exactly_what_is_seen(on_host: Callable[[str], Any], rng: torch.Generator) -> None:
    """Every visible pair is in a block that is visited; blocks taken without a mask hold only visible pairs; the mask is right.

    Tails, unequal lengths and windows, by the kernels' own index arithmetic, against the definition.
    """
    key_blocks, visible, query_blocks = (on_host(name) for name in ("key_blocks", "visible", "query_blocks"))

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=rng))

    for _ in range(300):
        q_len, k_len, block = draw(1, 90), draw(1, 90), [8, 16][draw(0, 2)]
        left, right = draw(-1, 40), draw(-1, 30)
        reach = (left >= 0, right >= 0)
        position = k_len - q_len
        queries, keys = torch.arange(q_len).unsqueeze(1), torch.arange(k_len)
        ahead = keys - queries - position
        seen = torch.ones(q_len, k_len, dtype=torch.bool)
        seen &= (ahead <= right) if reach[1] else seen
        seen &= (ahead >= -left) if reach[0] else seen
        mask = visible(queries, keys, k_len, left - position, right + position, *reach)
        assert torch.equal(mask.expand_as(seen), seen)
        for first in range(0, q_len, 16):
            rows = seen[first : first + 16]
            top, number, right_masked, left_masked = key_blocks(
                first, len(rows), position, k_len, left, right, *reach, block
            )
            visited = range((top - number + 1) * block, (top + 1) * block)
            assert number >= 1
            assert not rows[:, : visited.start].any()
            assert not rows[:, visited.stop :].any()
            for j in range(right_masked, number - left_masked):
                columns = slice((top - j) * block, (top - j + 1) * block)
                assert columns.stop <= k_len
                assert rows[:, columns].all()
        for first in range(0, k_len, 16):
            columns = seen[:, first : first + 16]
            low, full_low, full_high, high = query_blocks(first, 16, position, q_len, k_len, left, right, *reach, block)
            assert not columns[: low * block].any()
            assert not columns[high * block :].any()
            for index in range(max(low, full_low), min(high, full_high)):
                assert (index + 1) * block <= q_len
                assert first + 16 <= k_len
                assert columns[index * block : (index + 1) * block].all()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_tiles_of_pieces_cover_every_token_and_visible_pair(
    packed: bool, size: int, on_host: Callable[[str], Any], rng: torch.Generator
) -> None:
    """Dense, packed with padding, and zig-zag order, whatever the number of heads that take turns: a tile of queries or keys for
    every token, each once; and for each tile of keys exactly the queries that see any, against kernels/attention_spans.py."""
    from primus_turbo_plugin.kernels.attention import AttentionMask, ZigZag
    from primus_turbo_plugin.kernels.attention_spans import spans
    from primus_turbo_plugin.kernels.triton.attention_hopper_pieces import Pieces
    from tests.kernels.triton.attention_cases import packing

    names = ("query_tile", "key_tile", "query_runs", "query_block", "visible", "blocks_of_a_head")
    query_tile, key_tile, query_runs, query_block, visible, blocks_of_a_head = (on_host(name) for name in names)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=rng))

    block, lanes = 4, 3
    for rank in [rank for _ in range(20) for rank in range(size)]:
        left, right = draw(-1, 20), draw(-1, 6)
        packs, q_tokens, k_tokens = None, draw(1, 20), draw(1, 50)
        if size > 1:
            q_tokens = 2 * q_tokens
            k_tokens = q_tokens * size
        if packed:
            count = draw(1, 5)
            rooms = [2 * size * draw(0, 9) for _ in range(count)]
            lengths = [draw(0, room + 1) for room in rooms]
            k_rooms = rooms if size > 1 else [draw(0, 30) for _ in rooms]
            k_lengths = lengths if size > 1 else [draw(0, room + 1) for room in k_rooms]
            packs = packing("cpu", lengths, k_lengths, rooms, k_rooms)
            q_tokens, k_tokens = sum(rooms) // size + draw(0, 9), sum(k_rooms) + draw(0, 9)
            if 0 in (q_tokens, k_tokens):
                continue
        zigzag = ZigZag(rank=rank, size=size) if size > 1 else None
        mask = AttentionMask(window=(left, right), packing=packs, zigzag=zigzag)
        seen = torch.zeros(q_tokens, k_tokens, dtype=torch.int64)
        for span in spans(mask, q_tokens, k_tokens):
            for query in range(span.q_len):
                low, high = span.visible(query, query + 1, mask)
                seen[span.q_start + query, span.k_start + low : span.k_start + high] = 1

        problem = Problem(scale=1.0, cp_rank=rank, cp_size=size)
        lengths_on_host: list[_HostPointer] = []
        if packs is not None:
            tensors = (packs.cu_seqlens_q, packs.starts_q, packs.cu_seqlens_k, packs.starts_k)
            problem = Problem(
                scale=1.0, cp_rank=rank, cp_size=size, **dict(zip(("cu_q", "starts_q", "cu_k", "starts_k"), tensors))
            )
            lengths_on_host = [_HostPointer(x.tolist()) for x in tensors]
        arguments = lengths_on_host or [None] * 4
        meta = Pieces(packed=packed, zigzag=size > 1)
        sequences = 0 if packs is None else len(packs.cu_seqlens_q) - 1
        reach = (left >= 0, right >= 0)

        slots = query_slots(torch.empty(1, q_tokens, 1, 1), problem, block)
        sizes = (slots, draw(1, lanes + 1), 1, lanes, q_tokens, k_tokens, sequences, rank, size)
        covered = torch.zeros(lanes, q_tokens, dtype=torch.int64)
        for item in range(slots * lanes):
            lane, _, first, q_start, q_len, room, k_start, k_len, position = query_tile(
                item, arguments, sizes, meta, block
            )
            covered[lane, q_start + first : q_start + min(room, first + block)] += 1
            for row in range(first, min(q_len, first + block)):
                keys = torch.arange(k_len)
                row_mask = visible(torch.tensor(row), keys, k_len, left - position, right + position, *reach)
                assert torch.equal(row_mask.long(), seen[q_start + row, k_start : k_start + k_len])
        assert (covered == 1).all()

        slots = key_slots(torch.empty(1, k_tokens, 1, 1), problem, block)
        sizes = (slots, draw(1, lanes + 1), lanes, 1, lanes, q_tokens, k_tokens, sequences, rank, size)
        stored, visited = torch.zeros(lanes, k_tokens, dtype=torch.int64), torch.zeros_like(seen)
        for program in range(slots * lanes):
            _, group, _, sequence, first, k_start, k_len, room = key_tile(program, arguments, sizes, meta, block)
            runs = query_runs(sequence, first, k_len, arguments, sizes, left, right, meta, *reach, block, block)
            each = blocks_of_a_head(runs, meta)
            if first >= room:
                assert each == 0  # nothing is copied for it
                continue
            stored[group, k_start + first : k_start + min(room, first + block)] += 1
            for j in range(2 * each if group == 0 else 0):
                head, index, q_start, q_len, full_low, full_high, near, far = query_block(j, runs, each, meta)
                rows, keys = torch.arange(index * block, (index + 1) * block), first + torch.arange(block)
                ok = visible(rows.unsqueeze(1), keys, k_len, near, far, *reach) & (rows < q_len).unsqueeze(1)
                if full_low <= index < full_high:
                    assert ok.all()
                for row, key in ok.nonzero().tolist() if head == 0 else []:
                    visited[q_start + int(rows[row]), k_start + int(keys[key])] += 1
        assert (stored == 1).all()
        assert torch.equal(visited, seen)


APPLIES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "plain": ({}, {}, True),
    "window and sinks": ({"left": 5, "sinks": torch.zeros(4)}, {}, True),
    "softcap": ({"softcap": 2.0}, {}, False),
    "dropout": ({"seed": torch.zeros(1, dtype=torch.int64)}, {}, False),
    "mask tensor": ({"masked": torch.zeros(1, 1, 1, 1, dtype=torch.bool)}, {}, False),
    "negative scale": ({"scale": -0.1}, {}, False),
    "dim 100": ({}, {"dim": 100}, False),
    "dim 192": ({}, {"dim": 192}, True),
    "dim 256": ({}, {"dim": 256}, True),
    "dim 264": ({}, {"dim": 264}, False),
    "misaligned": ({}, {"offset": 1}, False),
    "no keys": ({}, {"keys": 0}, False),
}


@pytest.mark.parametrize("name", APPLIES)
def test_what_the_kernels_cannot_do_goes_to_the_portable_ones(name: str) -> None:
    fields, shape, expected = APPLIES[name]
    problem = Problem(**({"scale": 0.1, "right": 0} | fields))
    dim, offset, keys, batch = (shape.get(*item) for item in (("dim", 128), ("offset", 0), ("keys", 16), ("batch", 1)))
    q = torch.empty(batch * 16 * 4 * dim + offset, dtype=torch.bfloat16)[offset:].view(batch, 16, 4, dim)
    k = torch.empty(batch, keys, 2, dim, dtype=torch.bfloat16)
    v = torch.empty(batch, keys, 2, min(dim, 128), dtype=torch.bfloat16)
    for kernel in hopper.SEEN_RIGHT:
        assert hopper.applies(kernel, problem, q, k, v) == expected
        assert not hopper.applies(
            kernel, problem, q, k, v, q[:1].expand(2, 16, 4, dim)
        )  # a gradient that was broadcast


@pytest.mark.parametrize("order", ["packed", "zig-zag", "packed zig-zag"])
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_a_kernel_takes_the_orders_that_a_gpu_has_seen_right(
    kernel: hopper.Kernel, order: hopper.Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel's line of the table decides about it alone; a length that no descriptor of lse could follow is fine."""
    q, k = (torch.empty(1, 18, heads, 64, dtype=torch.bfloat16) for heads in (4, 2))
    for line in hopper.SEEN_RIGHT:
        monkeypatch.setitem(hopper.SEEN_RIGHT, line, frozenset({"dense", order} if line == kernel else {"dense"}))
    assert hopper.order_of(PROBLEMS[order]) == order
    for line in hopper.SEEN_RIGHT:
        assert hopper.applies(line, PROBLEMS[order], q, k, k) == (line == kernel)
        assert hopper.applies(line, PROBLEMS["causal"], q, k, k) == (line != "dkdv")  # 18 is no multiple of 4


@pytest.mark.parametrize("on", ["", "forward", "dq", "dkdv", "forward dq dkdv"])
def test_a_pass_of_packed_sequences_is_launched_by_its_line_of_the_table(
    on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hopper's kernel where the line has packed sequences, the portable one where not, whatever the other passes take."""
    from primus_turbo_plugin.kernels.attention import AttentionMask, AttentionOptions
    from primus_turbo_plugin.kernels.triton import attention, attention_ops
    from tests.kernels.triton.attention_cases import packing

    launched: list[str] = []
    monkeypatch.setattr(Launch, "run", lambda self: launched.append(self.kernel.fn.__name__))
    monkeypatch.setattr(attention_ops, "_arch", lambda q: "sm90")
    for line in hopper.SEEN_RIGHT:
        monkeypatch.setitem(
            hopper.SEEN_RIGHT, line, frozenset({"dense", "packed"} if line in on.split() else {"dense"})
        )
    q, k = (torch.zeros(1, 18, heads, 64, dtype=torch.bfloat16) for heads in (4, 2))
    options = AttentionOptions(scale=0.1, mask=AttentionMask(causal=True, packing=packing("cpu", [5, 0, 13])))
    out, lse = attention.attention_fwd(q, k, k, options)
    attention.attention_bwd(q, q, k, k, out, lse, options)
    names = {"forward": "fwd", "dkdv": "dkdv", "dq": "dq"}
    forward, dkdv, dq = (
        f"attention_{'hopper_' * (line in on.split())}{names[line]}_kernel" for line in ("forward", "dkdv", "dq")
    )
    assert launched == [forward, "attention_delta_kernel", dkdv, dq]
