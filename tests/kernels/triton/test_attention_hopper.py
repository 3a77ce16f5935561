"""The Hopper attention kernels compiled for sm_90 on any machine: they compile, and nothing spills.

What they compute is tested where there is a Hopper GPU (test_attention.py).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="compiling needs triton, which is not installed")

import triton

from primus_turbo_plugin.kernels.triton import attention_hopper as hopper
from primus_turbo_plugin.kernels.triton.attention_launch import Launch, Problem

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
PROBLEMS = {"causal": Problem(scale=0.1, right=0), "window": Problem(scale=0.1, left=1000, right=0)}


def _launch(kind: str, problem: Problem, dim: int = 128) -> Launch:
    q, k = (torch.empty(4096, 1, n, dim, dtype=torch.bfloat16).transpose(0, 1) for n in (8, 2))
    v, out = (torch.empty(4096, 1, n, 128, dtype=torch.bfloat16).transpose(0, 1) for n in (2, 8))
    rows = torch.empty(1, 8, 4096)
    if kind == "forward":
        return hopper.forward_launch(q, k, v, out, rows, problem)
    if kind == "dkdv":
        return hopper.dkdv_launch(q, k, v, out, k[None], v[None], rows, rows, problem)
    return hopper.dq_launch(q, k, v, out, q, rows, rows, problem)


def _ptx(step: Launch) -> str:
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    types = {torch.bfloat16: "bf16", torch.float32: "fp32"}
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
    text: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return text


@pytest.mark.parametrize(
    ("kind", "problem", "dim"),
    [("forward", "causal", 128), ("forward", "window", 192), ("dkdv", "causal", 128), ("dq", "causal", 128)],
)
def test_compiles_without_spills(kind: str, problem: str, dim: int, tmp_path: Path) -> None:
    """A spill of a register or two outside the loop is let pass: 16 bytes."""
    if not PTXAS.is_file():
        pytest.skip("this triton comes without ptxas")
    ptx = _ptx(_launch(kind, PROBLEMS[problem], dim))
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    (tmp_path / "kernel.ptx").write_text(ptx)
    command = [PTXAS, "-v", "--gpu-name", "sm_90a", tmp_path / "kernel.ptx", "-o", tmp_path / "kernel.cubin"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", result.stderr)]
    assert spilled
    assert max(spilled) <= 16, result.stderr
    assert "serialized" not in result.stderr  # ptxas says so where it cannot let products run on


class _HostLanguage:
    """What the index arithmetic of the kernels uses of the device language, on Python integers."""

    minimum = staticmethod(min)
    maximum = staticmethod(max)


def _on_host(function: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(function.fn.__globals__, "gl", _HostLanguage)
    return function.fn


def test_blocks_and_masks_cover_exactly_what_is_seen(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every visible pair is in a block that is visited; blocks taken without a mask hold only visible pairs; the mask is right.

    Tails, unequal lengths and windows, by the kernels' own index arithmetic, against the definition.
    """
    from primus_turbo_plugin.kernels.triton import attention_hopper_dkdv, attention_hopper_fwd

    key_blocks = _on_host(attention_hopper_fwd.key_blocks, monkeypatch)
    visible = _on_host(attention_hopper_fwd.visible, monkeypatch)
    query_blocks = _on_host(attention_hopper_dkdv.query_blocks, monkeypatch)

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


APPLIES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "plain": ({}, {}, True),
    "window and sinks": ({"left": 5, "sinks": torch.zeros(4)}, {}, True),
    "softcap": ({"softcap": 2.0}, {}, False),
    "dropout": ({"seed": torch.zeros(1, dtype=torch.int64)}, {}, False),
    "packed": ({"cu_q": torch.zeros(2, dtype=torch.int32)}, {}, False),
    "context-parallel": ({"cp_size": 2}, {}, False),
    "mask tensor": ({"masked": torch.zeros(1, 1, 1, 1, dtype=torch.bool)}, {}, False),
    "negative scale": ({"scale": -0.1}, {}, False),
    "dim 100": ({}, {"dim": 100}, False),
    "dim 192": ({}, {"dim": 192}, True),
    "dim 200": ({}, {"dim": 200}, False),
    "misaligned": ({}, {"offset": 1}, False),
    "no keys": ({}, {"keys": 0}, False),
}


@pytest.mark.parametrize("name", APPLIES)
def test_what_the_kernels_cannot_do_goes_to_the_portable_ones(name: str) -> None:
    fields, shape, expected = APPLIES[name]
    problem = Problem(**({"scale": 0.1, "right": 0} | fields))
    dim, offset, keys = shape.get("dim", 128), shape.get("offset", 0), shape.get("keys", 16)
    q = torch.empty(1 * 16 * 4 * dim + offset, dtype=torch.bfloat16)[offset:].view(1, 16, 4, dim)
    k = torch.empty(1, keys, 2, dim, dtype=torch.bfloat16)
    v = torch.empty(1, keys, 2, min(dim, 128), dtype=torch.bfloat16)
    assert hopper.applies(problem, q, k, v) == expected
    assert not hopper.applies(problem, q, k, v, q.expand(3, 16, 4, dim)[:2])  # a gradient that was broadcast


def test_dkdv_takes_no_head_wider_than_128() -> None:
    q = torch.empty(1, 16, 4, 192, dtype=torch.bfloat16)
    assert not hopper.applies(Problem(scale=0.1), q, q, q[..., :128].contiguous(), tail=False)
