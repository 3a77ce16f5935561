"""What `compile` tells the compiler, against what the JIT of the installed Triton would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from primus_turbo_plugin.amdgcn.specialize import specialize
from primus_turbo_plugin.errors import ConfigError

triton = pytest.importorskip("triton", reason="Triton is not installed: nothing to compare with")


@triton.jit
def kernel(x_ptr, n, alpha, flag, BLOCK: triton.language.constexpr = 64):
    pass


def facts(value: Any, **other: Any) -> tuple[str | None, list[list[Any]]]:
    """Type and attributes the first parameter gets; type None for a constant."""
    result = specialize(kernel, {"x_ptr": value, "n": 3, "alpha": 0.5, "flag": True}, other, True)
    return result.types.get("x_ptr"), result.attributes().get((0,), [])


VALUES = [
    torch.zeros(64, dtype=torch.bfloat16),
    torch.zeros(65, dtype=torch.float32)[1:],
    torch.zeros(64, dtype=torch.float8_e4m3fn),
    torch.zeros(64, dtype=torch.int64),
    0,
    1,
    5,
    16,
    -32,
    2**31 - 1,
    2**31,
    -(2**31) - 1,
    2**63,
    2**40,
    True,
    False,
    2.0,
    None,
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_the_rules_are_the_jits(value: Any) -> None:
    try:
        from triton._C.libtriton import native_specialize_impl
    except ImportError:
        pytest.skip("this Triton keeps its specialisation rules elsewhere")
    from triton.backends.amd.compiler import HIPBackend

    kind, descriptor = native_specialize_impl(HIPBackend, value, False, True, True)
    want = HIPBackend.parse_attr(descriptor) if isinstance(descriptor, str) else []
    got_kind, got = facts(value)
    assert (got_kind or "constexpr") == kind
    assert sorted(got) == sorted(want)


def test_numpy_arrays_specialise_like_tensors() -> None:
    assert facts(np.zeros(64, np.float16)) == facts(torch.zeros(64, dtype=torch.float16))


@pytest.mark.parametrize(
    ("text", "kind", "attributes"),
    [
        ("*bf16", "*bf16", [["tt.divisibility", 16], ["tt.pointer_range", 32]]),
        ("*bf16:1", "*bf16", [["tt.pointer_range", 32]]),
        ("i32", "i32", []),
        ("i32:16", "i32", [["tt.divisibility", 16]]),
        ("fp32", "fp32", []),
    ],
)
def test_types_can_be_given_instead_of_values(text: str, kind: str, attributes: list[list[Any]]) -> None:
    assert facts(text) == (kind, attributes)


def test_large_buffers_can_be_declared() -> None:
    result = specialize(kernel, {"x_ptr": "*fp32", "n": 3, "alpha": 0.5, "flag": True}, {}, False)
    assert result.attributes()[(0,)] == [["tt.divisibility", 16]]


def test_defaults_of_constants_are_used() -> None:
    result = specialize(kernel, {"x_ptr": "*fp32", "n": 1, "alpha": 0.5, "flag": True}, {}, True)
    assert result.constants == {"n": 1, "BLOCK": 64}


@pytest.mark.parametrize(
    ("args", "constants", "message"),
    [
        ({"x_ptr": "*fp32", "n": 3, "alpha": 0.5}, {}, "'flag' is neither in args nor in constants"),
        ({"x_ptr": "*fp32", "n": 3, "alpha": 0.5, "flag": True, "m": 1}, {}, "has no parameter m"),
        ({"x_ptr": "*fp32", "n": [3], "alpha": 0.5, "flag": True}, {}, "'n' has type list"),
        ({"x_ptr": torch.zeros(4, dtype=torch.complex64), "n": 3, "alpha": 0.5, "flag": True}, {}, "no Triton type"),
    ],
)
def test_mistakes_are_named(args: dict[str, Any], constants: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        specialize(kernel, args, constants, True)


def test_autotuned_kernels_are_unwrapped_and_other_things_refused() -> None:
    from primus_turbo_plugin.amdgcn.compiler import jit_function

    tuned = triton.autotune(configs=[triton.Config({"BLOCK": 64})], key=["n"])(kernel)
    assert jit_function(tuned) is kernel
    with pytest.raises(ConfigError, match=r"must be a function under @triton\.jit or @gluon\.jit, got function"):
        jit_function(facts)


def test_a_kernel_decorated_for_the_interpreter_is_refused() -> None:
    from triton.runtime.interpreter import InterpretedFunction

    from primus_turbo_plugin.amdgcn.compiler import compile as compile_kernel

    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        compile_kernel(InterpretedFunction(kernel.fn), "gfx950", {})
