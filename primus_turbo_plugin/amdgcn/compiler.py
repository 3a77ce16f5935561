"""Compiling Triton and Gluon kernels for AMD targets without an AMD GPU, as the JIT would.

The JIT looks at each argument and tells the compiler what it may assume: pointers aligned to 16 bytes, buffers under
2 GiB, integers divisible by 16, integers equal to 1 (which become constants). Code compiled without those facts is not
the code that would run: `buffer_*` becomes `global_*`, 16-byte accesses fall apart. `compile` therefore takes either example
values or types, and derives the same facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from primus_turbo_plugin.amdgcn.architecture import architecture
from primus_turbo_plugin.amdgcn.compiled import CompiledKernel
from primus_turbo_plugin.amdgcn.specialize import Specialization, specialize
from primus_turbo_plugin.errors import ConfigError, UnsupportedError


def require_triton() -> Any:
    """Import Triton, or say that it is missing."""
    try:
        import triton
    except ImportError as error:
        raise UnsupportedError(
            "amdgcn: compiling kernels needs the `triton` package, which is not installed; emulating existing assembly does not."
        ) from error
    return triton


def jit_function(kernel: Any) -> Any:
    """The JIT function behind a kernel, without `@triton.autotune` and `@triton.heuristics` around it.

    Raises:
        ConfigError: It is not a kernel, or was decorated for Triton's interpreter.
    """
    from triton.runtime import JITFunction

    inner = kernel
    while not isinstance(inner, JITFunction) and hasattr(inner, "fn"):
        inner = inner.fn
    if isinstance(inner, JITFunction):
        return inner
    raise ConfigError(
        f"amdgcn: a kernel must be a function under @triton.jit or @gluon.jit, got {type(kernel).__name__}. "
        "Kernels decorated while TRITON_INTERPRET=1 was set cannot be compiled."
    )


def _source(kernel: Any, facts: Specialization) -> Any:
    """The compiler's view of a Triton or Gluon kernel with its facts."""
    from triton.compiler import ASTSource

    if getattr(kernel, "is_gluon", lambda: False)():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    constants = {(facts.names.index(name),): value for name, value in facts.constants.items()}
    return ASTSource(kernel, signature=facts.signature_with_constants(), constexprs=constants, attrs=facts.attributes())


def compile(
    kernel: Any,
    arch: str,
    args: Mapping[str, Any],
    constants: Mapping[str, Any] | None = None,
    *,
    pointer_range_32: bool = True,
    **options: Any,
) -> CompiledKernel:
    """Compile a kernel for a target.

    Args:
        kernel: A function under `@triton.jit` or `@gluon.jit`. Of an autotuned kernel give one configuration's constants
            and options yourself.
        arch: gfx942, gfx950 or gfx1250.
        args: Every run-time argument by name, each either an example value (array, tensor, int, float, bool, None), from
            which the JIT's specialisation follows, or a type string: `"*bf16"` (aligned to 16 bytes), `"*bf16:1"` (not
            aligned), `"i32"` (nothing known), `"i32:16"` (divisible by 16), `"fp32"`.
        constants: `constexpr` arguments by name; parameters with defaults may be left out.
        pointer_range_32: Buffers are smaller than 2 GiB, which lets the compiler use buffer instructions.
        **options: `num_warps`, `num_stages`, `matrix_instr_nonkdim`, `waves_per_eu`, ... as at a launch.

    Returns:
        The compiled kernel.

    Raises:
        UnsupportedError: Triton is missing or the target unknown.
        ConfigError: The kernel is none, or an argument is missing, unknown or of no known type.
    """
    target = architecture(arch)
    triton = require_triton()
    from triton.backends.compiler import GPUTarget

    kernel = jit_function(kernel)
    facts = specialize(kernel, args, constants or {}, pointer_range_32)
    options.setdefault("num_warps", 4)
    binary = triton.compile(_source(kernel, facts), target=GPUTarget("hip", target.name, target.wave), options=options)
    metadata = binary.metadata._asdict() if hasattr(binary.metadata, "_asdict") else dict(vars(binary.metadata))
    return CompiledKernel(
        asm=binary.asm["amdgcn"],
        arch=target.name,
        num_warps=int(metadata["num_warps"]),
        shared=int(metadata["shared"]),
        signature=facts.runtime_signature(),
        constants=facts.constants,
        divisible=facts.divisible,
        metadata=metadata,
    )
