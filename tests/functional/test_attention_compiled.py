"""torch.compile takes a call of attention into one graph, backward included, for any features and lengths.

What is compiled runs on GPUs only (tests/kernels/triton); here the graphs are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.functional.attention import _selected as selected
from primus_turbo_plugin.functional.attention import attention
from primus_turbo_plugin.kernels.attention import AttentionMask, Dropout, Packing
from primus_turbo_plugin.kernels.triton import attention as triton_attention
from primus_turbo_plugin.precision.attention import AttentionPrecision

LENGTHS = torch.tensor([0, 7, 20], dtype=torch.int32)
SEED = torch.tensor([3])

CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "causal": lambda: {"mask": AttentionMask(causal=True)},
    "fp8": lambda: {"mask": AttentionMask(causal=True), "precision": AttentionPrecision(format="fp8")},
    "sinks, softcap, window": lambda: {
        "mask": AttentionMask(causal=True, window=(5, 0)),
        "sinks": torch.ones(4, requires_grad=True),
        "softcap": 2.0,
    },
    "packed, dropout": lambda: {
        "mask": AttentionMask(causal=True, packing=Packing(cu_seqlens_q=LENGTHS, cu_seqlens_k=LENGTHS)),
        "layout": "thd",
        "dropout": Dropout(probability=0.1, seed=SEED),
    },
}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody remembers who served before, nor that Triton served CPU tensors."""
    monkeypatch.setattr(triton_attention, "refusal", lambda device: None)
    selected.cache_clear()
    yield
    selected.cache_clear()


class _Traced(Exception):
    """In place of the run that follows compilation."""


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "any length"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_one_graph_with_both_passes(name: str, dynamic: bool, as_on_a_gpu: None) -> None:
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    more = CALLS[name]()
    shape = (20, 1) if more.get("layout", "sbhd") == "sbhd" else (20,)
    q, k, v = (torch.randn(*shape, n, 64, dtype=torch.bfloat16).requires_grad_() for n in (4, 2, 2))
    if dynamic:
        for x in (q, k, v):
            torch._dynamo.mark_dynamic(x, 0)
    operators: list[str] = []

    def look(graph: torch.fx.GraphModule, _: Any) -> Any:
        operators.extend(f"{node.target} {node.args}" for node in graph.graph.nodes)

        def run(*_: Any) -> Any:
            raise _Traced

        return run

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(2 * q, k, v, kernels=("triton",), **more) * 3

    compiled = torch.compile(function, backend=aot_autograd(fw_compiler=look, bw_compiler=look), fullgraph=True)
    with pytest.raises(_Traced):
        compiled(q, k, v)
    kind = "attention_fp8_fwd" if name == "fp8" else "attention_fwd"
    calls = [operator for operator in operators if f"primus_turbo_plugin.{kind}" in operator]
    assert len(calls) == 1
