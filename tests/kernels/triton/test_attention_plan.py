"""Repeated attention launches (attention_plan.py) are those that would be made anew; nothing stale is repeated."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="launches are made with triton, which is not installed")

from primus_turbo_plugin.kernels.attention import AttentionMask, AttentionOptions, Dropout, Packing, ZigZag
from primus_turbo_plugin.kernels.triton import attention, attention_ops, zeros
from primus_turbo_plugin.kernels.triton.attention_launch import Launch

LENGTHS = torch.tensor([0, 9, 24], dtype=torch.int32)
WRITTEN = ("out", "lse", "dq", "dk", "dv", "delta", "lse2")


class _Compiled(NamedTuple):
    """In place of a compiled kernel."""

    names: list[str]
    log: list[tuple[str, tuple[int, ...], dict[str, Any]]]

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        names, log = self

        def run(*values: Any) -> None:
            assert len(values) == len(names)
            log.append((f"repeated {names[0]}", grid, dict(zip(names, values))))

        return run


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, tuple[int, ...], dict[str, Any]]]]:
    """What is launched, in order, instead of launching."""
    launched: list[tuple[str, tuple[int, ...], dict[str, Any]]] = []

    def run(self: Launch) -> Any:
        for name in WRITTEN:
            reads_out = name == "out" and "lse2" in self.args
            if isinstance(self.args.get(name), Tensor) and not reads_out:
                self.args[name].zero_()
        values = self.args | self.constants
        names = self.kernel.arg_names
        launched.append((f"made {names[0]}", (*self.grid, 1, 1)[:3], {name: values[name] for name in names}))
        return _Compiled(names, launched)

    monkeypatch.setattr(Launch, "run", run)
    attention_ops._PLANS.clear()
    yield launched
    attention_ops._PLANS.clear()


class Case(NamedTuple):
    """A call: `make` gives q, k, v and dout of an arbitrary content, `more` its options."""

    arch: str = "sm90"
    tokens: int = 24
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    strided: bool = True
    offset: int = 0
    more: Callable[[], dict[str, Any]] = dict
    sinks: bool = False

    def tensors(self) -> list[Tensor]:
        shapes = [
            (n, d) for n, d in zip((self.heads[0], self.heads[1], self.heads[1]), (self.dims[0],) * 2 + (self.dims[1],))
        ]
        return [self._tensor(n, d) for n, d in (*shapes, (self.heads[0], self.dims[1]))]

    def _tensor(self, heads: int, dim: int) -> Tensor:
        size = self.tokens * heads * dim
        x = torch.randn(size + self.offset, dtype=torch.float32).bfloat16()[self.offset :]
        if self.strided:
            return x.view(self.tokens, 1, heads, dim).transpose(0, 1)
        return x.view(1, self.tokens, heads, dim)

    def options(self) -> AttentionOptions:
        return AttentionOptions(**({"scale": 0.1, "mask": AttentionMask(causal=True)} | self.more()))


def _packed() -> dict[str, Any]:
    lengths = LENGTHS.clone()
    return {"mask": AttentionMask(causal=True, packing=Packing(cu_seqlens_q=lengths, cu_seqlens_k=lengths))}


CASES = {
    "hopper": Case(),
    "hopper, sinks and a window": Case(sinks=True, more=lambda: {"mask": AttentionMask(window=(5, 3))}),
    "hopper, latent": Case(dims=(192, 128)),
    "hopper, wide": Case(dims=(256, 256), strided=False),
    "hopper, shared heads in parts": Case(heads=(8, 1)),
    "hopper, packed": Case(more=_packed),
    "hopper, no multiple of 4": Case(tokens=23),
    "hopper, softcap": Case(more=lambda: {"softcap": 2.0}),
    "hopper, misaligned": Case(offset=1),
    "gfx950": Case(arch="gfx950"),
    "gfx950, mask and dropout": Case(
        arch="gfx950",
        more=lambda: {
            "mask": AttentionMask(masked=torch.rand(1, 1, 24, 24) > 0.5),
            "dropout": Dropout(probability=0.1, seed=torch.tensor([3]), first_head=2),
        },
    ),
    "generic, packed zig-zag": Case(
        arch="generic",
        more=lambda: {"mask": dataclasses.replace(_packed()["mask"], zigzag=ZigZag(rank=1, size=2))},
    ),
}  # fmt: skip


def _call(case: Case, tensors: list[Tensor], options: AttentionOptions, sinks: Tensor | None) -> dict[int, str]:
    """Both passes; names of what they were given and gave, by address."""
    q, k, v, dout = tensors
    out, lse = attention.attention_fwd(q, k, v, options, sinks=sinks)
    dq, dk, dv, _, _ = attention.attention_bwd(dout, q, k, v, out, lse, options, sinks=sinks)
    named = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "sinks": sinks}
    packing, dropout = options.mask.packing, options.dropout
    named |= {} if packing is None else {"cu": packing.cu_seqlens_q}
    named |= {} if dropout is None else {"seed": dropout.seed}
    named |= {} if options.mask.masked is None else {"masked": options.mask.masked}
    return {x.data_ptr(): name for name, x in named.items() if x is not None}


def _comparable(log: list[tuple[str, tuple[int, ...], dict[str, Any]]], names: dict[int, str]) -> list[Any]:
    """The launches with names in place of addresses: what was made inside is numbered as it appears."""
    names = dict(names)

    def value(x: Any) -> Any:
        if isinstance(x, Tensor):
            return names.setdefault(x.data_ptr(), f"inside {len(names)}"), x.dtype
        if not hasattr(x, "base"):
            return x
        where = getattr(x.base, "tensor", x.base)
        fields = {key: field for key, field in vars(x).items() if key != "base"}
        return type(x), value(where), x.base.data_ptr() - where.data_ptr(), x.base.dtype, fields

    return [(what.split()[1], grid, {name: value(x) for name, x in args.items()}) for what, grid, args in log]


def _kinds(log: list[Any]) -> list[str]:
    return [what.split()[0] for what, *_ in log]


@pytest.mark.parametrize("name", CASES)
def test_a_repeated_launch_is_the_one_that_would_be_made(
    name: str, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments, constants, grid, descriptors and the roles of all tensors, of tensors that lie alike and elsewhere."""
    case = CASES[name]
    monkeypatch.setattr(attention_ops, "_arch", lambda q: case.arch)
    monkeypatch.setattr(attention_ops, "_compute_units", lambda q: 3)  # a group's heads are shared out, if many
    first, second = [(case.tensors(), case.options(), torch.zeros(case.heads[0]) if case.sinks else None) for _ in "ab"]
    _call(case, *first)
    assert _kinds(log) == ["made"] * 4
    log.clear()
    names = _call(case, *second)
    assert _kinds(log) == ["repeated"] * 4
    repeated = _comparable(log, names)
    log.clear()
    attention_ops._PLANS.clear()
    made = _comparable(log, names := _call(case, *second))
    assert _kinds(log) == ["made"] * 4
    made = _comparable(log, names)
    assert repeated == made


BASE = Case()
CHANGES: dict[str, Case] = {
    "strides": BASE._replace(strided=False, heads=(4, 2), tokens=24),
    "alignment": BASE._replace(offset=8),
    "alignment to less": BASE._replace(offset=1),
    "length": BASE._replace(tokens=28),
    "heads": BASE._replace(heads=(2, 2)),
    "dim": BASE._replace(dims=(128, 64)),
    "architecture": BASE._replace(arch="generic"),
    "scale": BASE._replace(more=lambda: {"scale": 0.2}),
    "mask": BASE._replace(more=lambda: {"mask": AttentionMask()}),
    "window": BASE._replace(more=lambda: {"mask": AttentionMask(causal=True, window=(4, 0))}),
    "sinks": BASE._replace(sinks=True),
    "softcap": BASE._replace(more=lambda: {"softcap": 1.0}),
    "packed": BASE._replace(more=_packed),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_changes_is_launched_anew(name: str, log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    changed = CHANGES[name]
    for case, kind in ((BASE, "made"), (changed, "made"), (BASE, "repeated"), (changed, "repeated")):
        monkeypatch.setattr(attention_ops, "_arch", lambda q, arch=case.arch: arch)
        log.clear()
        _call(case, case.tensors(), case.options(), torch.zeros(case.heads[0]) if case.sinks else None)
        expected = ["repeated"] * 4 if name == "alignment" else [kind] * 4
        assert _kinds(log) == (expected if case is changed and name == "alignment" else [kind] * 4)


def test_other_dtypes_are_launched_anew(log: list[Any]) -> None:
    """Of the tensors, of out and of the gradients."""
    tensors, options = BASE.tensors(), BASE.options()
    halves = [x.half() for x in tensors]
    for q, k, v, dout in (tensors, halves):
        for out_dtype in (q.dtype, torch.float32):
            out = torch.empty_like(dout, dtype=out_dtype)
            _, lse = attention.attention_fwd(q, k, v, options, out=out)
            for dtype in (None, torch.float32):
                attention.attention_bwd(dout, q, k, v, out, lse, options, kv_grad_dtype=dtype)
            attention.attention_bwd(dout, q, k, v, out, lse, options, delta=torch.zeros_like(lse))
    assert set(_kinds(log)) == {"made"}


def test_a_tensor_given_for_two_is_not_mistaken_for_both(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of attention(x, x, x) serves another q, k and v."""
    monkeypatch.setattr(attention_ops, "_arch", lambda q: "sm90")
    case = Case(heads=(2, 2))
    options = case.options()
    x = case.tensors()[0]
    attention.attention_fwd(x, x, x, options)
    log.clear()
    q, k, v, _ = case.tensors()
    attention.attention_fwd(q, k, v, options)
    ((what, _, args),) = log
    assert what.startswith("repeated")
    for name, tensor in (("q_desc", q), ("k_desc", k), ("v_desc", v)):
        assert args[name].base.data_ptr() == tensor.data_ptr()


def test_plans_keep_no_tensor_and_do_not_pile_up(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_ops, "_arch", lambda q: "sm90")
    tensors = CASES["hopper, packed"].tensors()
    options = CASES["hopper, packed"].options()
    assert options.mask.packing is not None
    alive = [weakref.ref(x) for x in (*tensors, options.mask.packing.cu_seqlens_q)]
    for _ in ("made", "repeated"):
        _call(BASE, tensors, options, None)
    log.clear()
    del tensors, options
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5
    q, k, v, _ = BASE.tensors()
    for step in range(300):
        attention.attention_fwd(q, k, v, AttentionOptions(scale=0.1 + step))
    assert len(attention_ops._PLANS._plans) <= 256


def test_what_compiles_nothing_is_launched_anew(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter gives no compiled kernel."""
    monkeypatch.setattr(Launch, "run", lambda self: log.append(("made", self.grid, self.args)))
    for _ in range(2):
        _call(BASE, BASE.tensors(), BASE.options(), None)
    assert len(log) == 8


def test_tritons_launcher_sees_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Triton's JIT and by the plan: a real compiled kernel, on a driver without a GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from primus_turbo_plugin.kernels.triton import attention_bwd, attention_launch
    from primus_turbo_plugin.kernels.triton.attention_plan import Plans

    seen: list[tuple[Any, ...]] = []

    class _Launcher:
        def __init__(self, *_: Any) -> None: ...

        def __call__(self, *args: Any) -> None:
            seen.append(args)

    class _Utils:
        def load_binary(self, *_: Any) -> tuple[Any, ...]:
            return None, None, 32, 0, 1024

        def get_device_properties(self, _: int) -> dict[str, int]:
            return {"max_shared_mem": 1 << 18}

    class _Driver:
        launcher_cls, utils = _Launcher, _Utils()

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _: int) -> int:
            return 7

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

    before = driver._active
    driver.set_active(_Driver())
    kernel = type(attention_bwd.attention_delta_kernel)(attention_bwd.attention_delta_kernel.fn)
    monkeypatch.setattr(attention_launch, "attention_delta_kernel", kernel)
    try:
        plans = Plans()
        for _ in range(2):
            out, dout = (torch.zeros(1, 70, 2, 48, dtype=torch.bfloat16) for _ in "ab")
            lse, delta, lse2 = (torch.zeros(1, 2, 70) for _ in "abc")
            tensors = (out, dout, lse, delta, lse2)
            plan = plans.get("key")
            if plan is None:
                plans.run_and_keep("key", tensors, lambda tensors: [attention_launch.delta_launch(*tensors)])
            else:
                plan.repeat(tensors)
    finally:
        driver.set_active(before)
    first, second = (
        [x.shape if isinstance(x, Tensor) else x for x in args if type(x).__name__ != "LazyDict"] for args in seen
    )
    assert first == second
    assert [x.data_ptr() for x in seen[1] if isinstance(x, Tensor)] == [x.data_ptr() for x in tensors]


def test_modes_see_the_operators(log: list[Any]) -> None:
    """Selective checkpointing, counting and tracing work by dispatch modes."""

    class _Recorder(TorchDispatchMode):
        names: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func.name())
            return func(*args, **(kwargs or {}))

    for _ in range(2):
        with _Recorder() as mode:
            mode.names.clear()
            _call(BASE, BASE.tensors(), BASE.options(), None)
        ours = [name for name in mode.names if name.startswith("primus_turbo_plugin::")]
        assert ours == ["primus_turbo_plugin::attention_fwd", "primus_turbo_plugin::attention_bwd"]


def test_the_operators_pass_opcheck_without_a_gpu(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Schema, fake kernels and tracing; launches are pretended, so that values are not looked at."""
    q, k, v, dout = BASE.tensors()
    options = BASE.options()
    fields = attention._fields(options, torch.zeros(4))
    monkeypatch.setattr(attention_ops._PLANS, "get", lambda key: None)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    for counter in ((), (None,), (torch.zeros(1, dtype=torch.int32),)):
        torch.library.opcheck(
            attention_ops.attention_fwd, (q, k, v, torch.empty_like(dout), *fields, *counter), test_utils=tests
        )
        arguments = (dout, q, k, v, dout, torch.zeros(1, 4, 24), None, None, torch.float32, *fields, *counter)
        torch.library.opcheck(attention_ops.attention_bwd, arguments, test_utils=tests)


def test_the_forward_says_that_out_has_changed(log: list[Any]) -> None:
    """Autograd must not use a saved `out` from before."""
    q, k, v, dout = BASE.tensors()
    out = torch.empty_like(dout)
    before = out._version
    attention.attention_fwd(q, k, v, BASE.options(), out=out)
    assert out._version > before
    with torch.inference_mode():
        attention.attention_fwd(q, k, v, BASE.options(), out=torch.empty_like(dout))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stream that can be changed and captured, on a machine without one; zeros are made on the CPU."""

    class _State:
        stream, capturing, filled = 1, False, 0

        @property
        def cuda_stream(self) -> int:
            return self.stream

    state, make = _State(), torch.zeros

    def counted(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        state.filled += 1
        return make(*shape, dtype=dtype)

    monkeypatch.setattr(zeros, "_ready", {})
    monkeypatch.setattr(torch, "zeros", counted)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: state)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    return state


def test_zeros_are_given_once_and_by_stream_and_device(gpu: Any) -> None:
    device = torch.device("cuda", 0)
    given = [zeros.fresh_zero(device) for _ in range(600)]
    assert gpu.filled == 3
    places = [zero.data_ptr() for zero in given if zero is not None]
    assert len(set(places)) == 600
    assert all(place % 16 == 0 for place in places)
    assert all(zero is not None and zero.dtype == torch.int32 and not zero.any() for zero in given)
    gpu.stream = 2
    zeros.fresh_zero(device)
    zeros.fresh_zero(torch.device("cuda", 1))
    assert gpu.filled == 5
    gpu.stream = 1
    zeros.fresh_zero(device)
    assert gpu.filled == 5
    for gpu.stream in range(100):
        zeros.fresh_zero(device)
    assert len(zeros._ready) <= 64


def test_no_zeros_are_kept_where_a_call_is_recorded(gpu: Any) -> None:
    """A graph's replay must start at zero, and what a mode makes may be no tensor at all."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    device = torch.device("cuda", 0)
    zeros.fresh_zero(device)
    gpu.capturing = True
    assert zeros.fresh_zero(device) is None
    gpu.capturing = False
    with FakeTensorMode():
        assert zeros.fresh_zero(device) is None
    assert zeros.fresh_zero(torch.device("cpu")) is None
    with torch.inference_mode():
        gpu.stream = 3
        zero = zeros.fresh_zero(device)
    assert zero is not None
    assert not zero.is_inference()
