"""Launches that come again pass what a first one would, with their own tensors. No GPU is needed: kernels are recorded."""

from __future__ import annotations

import gc
import operator
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels' signatures need triton, which is not installed")

from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from primus_turbo_plugin.errors import ConfigError, ShapeError
from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.kernels.triton import fused, gemm, grouped_gemm, launching, norm, quantize, targets
from primus_turbo_plugin.kernels.triton.gemm_config import GemmConfig
from primus_turbo_plugin.kernels.triton.gemm_key import gpu_of
from primus_turbo_plugin.kernels.triton.gemm_launch import CallLauncher, KernelCall
from primus_turbo_plugin.kernels.triton.grouped_quantize_kernel import expert_fp8_kernel
from primus_turbo_plugin.kernels.triton.launching import Answers, Launcher
from primus_turbo_plugin.kernels.triton.quantize_copy import CopyPlan, amax_buffers
from primus_turbo_plugin.kernels.triton.quantize_shared import quantize_shared_kernel
from primus_turbo_plugin.kernels.triton.quantize_tile import quantize_kernel
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor
from primus_turbo_plugin.precision.rounding import RoundingKey

H200 = SimpleNamespace(
    major=9,
    minor=0,
    warp_size=32,
    shared_memory_per_multiprocessor=228 << 10,
    multi_processor_count=132,
    gcnArchName="",
)
CACHES = [
    (quantize, "_PLANS"),
    (fused, "_PLANS"),
    (norm, "_FORWARD"),
    (norm, "_BACKWARD"),
    (gemm, "_PROGRAMS"),
    (grouped_gemm, "_PROGRAMS"),
]
MX, MX_ROTATED = QuantSpec(format="mxfp4"), QuantSpec(format="mxfp4", hadamard=16, random_signs=True)
STOCHASTIC = QuantSpec(format="mxfp8", rounding="stochastic")
ONE_SCALE, ROWWISE = QuantSpec(format="fp8"), QuantSpec(format="fp8", block="rowwise", element="e5m2")
Event = tuple[str, tuple[int, ...], dict[str, Any], dict[str, Any]]
"""Kernel, grid, arguments, and what the kernel was compiled for."""


class Recorded(list[Event]):
    """Every launch. A JIT launch gives a compiled kernel, which takes its arguments by position."""

    def run(self, kernel: Any, args: tuple[Any, ...], grid: tuple[int, ...], named: dict[str, Any]) -> Any:
        names, events = [parameter.name for parameter in kernel.params], self
        given = {**dict(zip(names, args)), **{name: named.pop(name) for name in names if name in named}}
        assert list(given) == names
        compiled_for = {p.name: _specialised(given[p.name], exactly=p.is_constexpr) for p in kernel.params}
        for parameter in kernel.params:
            if parameter.do_not_specialize:
                assert -(1 << 31) <= given[parameter.name] < 1 << 31
                compiled_for[parameter.name] = "int32"
        compiled_for |= named
        self.append((kernel.fn.__name__, (*grid, 1, 1)[:3], given, compiled_for))

        class Compiled:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                def launch(*args: Any) -> None:
                    events.append((kernel.fn.__name__, grid, dict(zip(names, args, strict=True)), compiled_for))

                return launch

        return Compiled()


def _specialised(value: Any, *, exactly: bool) -> Any:
    """What of an argument Triton compiles into a kernel."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, tuple(value.block_shape)
    if isinstance(value, int) and not exactly:
        return value == 1, value % 16 == 0, value.bit_length() < 32
    return "a float" if isinstance(value, float) and not exactly else value


@pytest.fixture
def launches(monkeypatch) -> Iterator[Recorded]:
    """Tensors of the CPU pass for those of an H200."""
    recorded = Recorded()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(quantize, "check", _check_key)
    monkeypatch.setattr(JITFunction, "run", lambda self, *a, grid, warmup, **kw: recorded.run(self, a, grid, kw))
    _forget(monkeypatch)
    yield recorded
    for remembered in (targets.kernel_target, targets.warp_size, targets.shared_memory_bytes, gpu_of):
        remembered.cache_clear()


def _check_key(x: torch.Tensor, specs: tuple[QuantSpec | None, ...], key: RoundingKey | None) -> None:
    if key is None and any(spec is not None and spec.rounding == "stochastic" for spec in specs):
        raise ConfigError("needs a RoundingKey")


def _forget(monkeypatch) -> None:
    for module, name in CACHES:
        monkeypatch.setattr(module, name, Answers())


def _matrix(rows: int, cols: int, dtype: torch.dtype, choose: random.Random) -> torch.Tensor:
    """Contiguous, aligned or not, rows apart, transposed, or every other column."""
    flat = torch.zeros(rows * cols + 8, dtype=dtype)
    views = [
        lambda: torch.zeros(rows, cols, dtype=dtype),
        lambda: torch.zeros(rows, cols + 16, dtype=dtype)[:, :cols],
        lambda: torch.zeros(cols, rows, dtype=dtype).t(),
        lambda: flat[1 : rows * cols + 1].view(rows, cols),
        lambda: flat[8:].view(rows, cols),
        lambda: torch.zeros(rows, 2 * cols, dtype=dtype)[:, ::2],
    ]
    return choose.choice(views)()


DECODED_ONCE = GemmConfig(block_m=64, block_n=64, block_k=64, num_warps=4, decode="scratch")
PAIRS = [
    (MX, MX_ROTATED), (MX_ROTATED, MX), (STOCHASTIC, ROWWISE), (ONE_SCALE, None), (QuantSpec.bf16(), ONE_SCALE),
    (QuantSpec(format="mxfp4", hadamard=64), QuantSpec(format="fp8", block="1x128")),
]  # fmt: skip


def _case(seed: int) -> Callable[[], tuple[dict[str, Any], Any]]:
    """One call with new tensors each time: (its tensors by name, what it gave). Few of everything, so that many nearly agree."""

    def call() -> tuple[dict[str, Any], Any]:
        choose = random.Random(seed)
        kind = choose.choice(
            ["quantize", "quantize", "rms", "sums", "norm", "norm", "norm backward", "gemm", "rows", "depth"]
        )
        rows, cols = choose.choice([(33, 128), (128, 128), (0, 128)] if seed % 8 else [(33, 9000), (100, 264)])
        dtype = torch.float32 if kind in ("quantize", "norm") and choose.random() < 0.2 else torch.bfloat16
        x = _matrix(rows, cols, dtype, choose)
        weight, statistic = torch.zeros(cols + 1)[choose.choice([0, 1]) :][:cols], torch.zeros(rows)
        given = {"x": x, "weight": weight, "rstd": statistic}
        pair, layout, flag = choose.choice(PAIRS), choose.choice(["plain", "gfx950"]), choose.random() < 0.5
        key = RoundingKey(seed=1, draw=choose.randrange(4), tensor=3, rank=0)
        if kind == "quantize":
            return given, quantize.quantize_both(x, *pair, key=key, signs_seed=5, scale_layout=layout)
        if kind == "rms":
            made = fused.rms_norm_quantize(x, weight, 1e-5, *PAIRS[flag], zero_centered_gamma=flag, signs_seed=5)
            return given, made
        if kind == "sums":
            return given, fused.quantize_and_sum(x, *PAIRS[2 * flag], key=key, signs_seed=5, scale_layout=layout)
        if kind == "norm":
            bias = given["bias"] = torch.zeros_like(weight, dtype=torch.float16)
            return given, norm.layer_norm_fwd(x, weight, bias if flag else None, 1e-5)
        if kind == "norm backward":
            dy = given["dy"] = x.clone() if choose.random() < 0.7 else _matrix(rows, cols, dtype, choose)
            return given, norm.rms_norm_bwd(dy, x, weight, statistic, dresidual=dy if flag else None)
        if kind in ("rows", "depth"):  # another number of tokens every time
            rows = choose.choice([1, 33, 100, 128, 200, 4096])
            x = given["x"] = _matrix(rows, cols, torch.bfloat16, choose)
            groups = Groups(torch.zeros(choose.choice([3, 4]), dtype=torch.int64), rows)
            experts = groups.count
        if kind == "rows":
            weight = given["weight"] = torch.zeros(experts, 64, cols, dtype=torch.bfloat16)
            if flag:
                weight = given["weight"] = torch.zeros(experts, cols, 64, dtype=torch.bfloat16).transpose(1, 2)
            given["offsets"] = groups.offsets
            if choose.random() < 0.5 or cols % 32:
                return given, grouped_gemm.grouped_gemm_nt(x, weight, groups, out_dtype=torch.bfloat16)
            data, scale = (
                torch.zeros(rows, cols // 2, dtype=torch.uint8),
                torch.zeros(rows, cols // 32, dtype=torch.uint8),
            )
            given |= {"data": data, "scale": scale}
            a, config = QuantizedTensor(data, scale, MX, (rows, cols)), DECODED_ONCE if flag else None
            return given, grouped_gemm.grouped_gemm_nt(a, weight, groups, out_dtype=torch.bfloat16, config=config)
        if kind == "depth":
            dy, out = _matrix(rows, 64, torch.bfloat16, choose), torch.zeros(experts, 64, cols)
            given |= {"dy": dy, "out": out, "offsets": groups.offsets}
            return given, grouped_gemm.grouped_gemm_depth(dy.t(), x.t(), groups, out, accumulate=flag)
        b = given["b"] = _matrix(64, cols, torch.bfloat16, choose)
        bias = given["bias"] = torch.zeros(64)
        return given, gemm.gemm_nt(x, b, out_dtype=torch.bfloat16, bias=bias if flag else None)

    return call


def _launched(call: Callable[[], tuple[dict[str, Any], Any]], launches: Recorded) -> tuple[Any, list[Any]]:
    """What a call gave, and what it launched: tensors by the place they have in it, their shape, strides and alignment."""
    launches.clear()
    given, results = call()
    results = results if isinstance(results, tuple) else (results,)
    for index, result in enumerate(results):
        parts = (result.data, result.block_scale) if isinstance(result, QuantizedTensor) else (result,)
        given |= {f"{index}.{part}": tensor for part, tensor in enumerate(parts) if tensor is not None}
    places = {tensor.data_ptr(): name for name, tensor in given.items()}

    def shown(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            words = value.element_size() * value.numel()
            return places.get(value.data_ptr(), "scratch"), words, value.data_ptr() % 16
        if isinstance(value, TensorDescriptor):
            return shown(value.base), tuple(value.shape), tuple(value.strides), tuple(value.block_shape)
        return value

    events = [(name, grid, {k: shown(arg) for k, arg in args.items()}, kept) for name, grid, args, kept in launches]
    about = [
        (r.spec, r.shape, r.signs_seed, r.scale_layout, r.data.shape, r.block_scale.shape, r.block_scale.dtype)
        if isinstance(r, QuantizedTensor)
        else None
        if r is None
        else (r.dtype, r.shape, r.stride())
        for r in results
    ]
    launches.clear()
    return about, events


def test_a_later_call_launches_what_a_first_one_would(launches, monkeypatch, rng) -> None:
    """Over random tensors and specs that come again in any order, against the same calls with nothing remembered."""
    seeds = torch.randint(1 << 30, (250,), generator=rng).tolist()
    calls = [_case(seed) for seed in seeds]
    order = torch.randint(len(calls), (500,), generator=rng).tolist()
    later = [_launched(calls[index], launches) for index in order]
    assert sum(len(events) for _, events in later) > 300
    for index, got in zip(order, later):
        _forget(monkeypatch)
        assert got == _launched(calls[index], launches), f"case {seeds[index]}"


SMALL = GemmConfig(block_m=64, block_n=64, block_k=64, num_warps=4, persistent=True)


@pytest.mark.parametrize("kind", ["rows", "rows of mxfp4", "depth"])
@pytest.mark.parametrize("config", [None, SMALL, replace(SMALL, loads="descriptors"), DECODED_ONCE], ids=str)
def test_experts_any_number_of_tokens_is_launched_as_if_it_were_the_first(kind, config, launches, monkeypatch) -> None:
    if kind == "rows of mxfp4" and config is not None and config.loads == "descriptors":
        config = replace(config, decode="scratch")
    elif kind != "rows of mxfp4" and config is DECODED_ONCE:
        config = replace(SMALL, block_k=32)

    def call(tokens: int) -> tuple[dict[str, Any], Any]:
        groups, x = Groups(torch.zeros(4, dtype=torch.int64), tokens), torch.zeros(tokens, 128, dtype=torch.bfloat16)
        weight, out = torch.zeros(3, 64, 128, dtype=torch.bfloat16), torch.zeros(3, 64, 128)
        dy = torch.zeros(tokens, 64, dtype=torch.bfloat16)
        given = {"x": x, "weight": weight, "out": out, "dy": dy, "offsets": groups.offsets}
        if kind == "depth":
            return given, grouped_gemm.grouped_gemm_depth(dy.t(), x.t(), groups, out, accumulate=True, config=config)
        a: Any = x
        if kind != "rows":
            given["data"], given["scale"] = (torch.zeros(tokens, size, dtype=torch.uint8) for size in (64, 4))
            a = QuantizedTensor(given["data"], given["scale"], MX, (tokens, 128))
        return given, grouped_gemm.grouped_gemm_nt(a, weight, groups, out_dtype=torch.bfloat16, config=config)

    numbers = [200, 254, 1, 2, 380, 64, 33, 4096, 4090, 65, 1, 200]
    if kind == "depth" and config is not None and config.loads == "descriptors":
        numbers = [tokens for tokens in numbers if tokens > 1]  # of one token, columns are no rows of 16 bytes
    later = [_launched(lambda tokens=tokens: call(tokens), launches) for tokens in numbers]
    for tokens, got in zip(numbers, later):
        _forget(monkeypatch)
        assert got == _launched(lambda tokens=tokens: call(tokens), launches), tokens


def test_experts_with_other_numbers_of_tokens_share_a_kernel(launches) -> None:
    """Routing gives another number in every step; the grid and the descriptors follow it."""
    jit, weight = [], torch.zeros(3, 64, 128, dtype=torch.bfloat16)
    run = launches.run
    launches.run = lambda kernel, *rest: (jit.append(kernel.fn.__name__), run(kernel, *rest))[1]
    for tokens in (200, 254, 380, 255):  # 65 to 128 an expert: one configuration
        groups, dy = Groups(torch.zeros(4, dtype=torch.int64), tokens), torch.zeros(tokens, 64, dtype=torch.bfloat16)
        x = torch.zeros(tokens, 128, dtype=torch.bfloat16)
        assert grouped_gemm.grouped_gemm_nt(x, weight, groups, out_dtype=torch.bfloat16).shape == (tokens, 64)
        grouped_gemm.grouped_gemm_depth(dy.t(), x.t(), groups, torch.zeros(3, 64, 128), accumulate=True)
        with pytest.raises(ShapeError, match=f"T = {tokens}"):
            grouped_gemm.grouped_gemm_nt(x[1:], weight, groups, out_dtype=torch.bfloat16)
        with pytest.raises(ShapeError, match=f"T = {tokens}"):
            grouped_gemm.grouped_gemm_depth(dy.t(), x[1:].t(), groups, torch.zeros(3, 64, 128), accumulate=True)
    assert len(jit) == 2
    assert len(launches) == 8


def test_only_the_first_launch_goes_through_the_jit(launches) -> None:
    """Views for the JIT's sake are made once; a compiled kernel takes the tensors themselves."""
    dtypes = []
    for _ in range(3):
        quantize.quantize_both(torch.zeros(128, 128, dtype=torch.bfloat16), MX, MX)
        ((_, _, args, _),) = launches
        dtypes.append((args["x_ptr"].dtype, args["row_data"].dtype, args["col_data"].dtype))
        launches.clear()
    assert dtypes[0] == (torch.int32,) * 3
    assert dtypes[1] == dtypes[2] == (torch.bfloat16, torch.uint8, torch.uint8)


def test_triton_s_interpreter_is_asked_every_time(monkeypatch) -> None:
    """It compiles nothing, and its functions have no `params`."""
    seen: list[Any] = []
    monkeypatch.setattr(InterpretedFunction, "run", lambda self, *args, **named: seen.append((args, named)))
    kernel = InterpretedFunction(quantize_kernel.fn)
    constants = dict.fromkeys(("ROW", "COL", "BLOCK_M", "BLOCK_N"))
    launch = Launcher(kernel, (1,), constants, {}, {0: torch.int32})
    for _ in range(2):
        launch(torch.zeros(4, dtype=torch.bfloat16))
    assert [args[0].dtype for args, _ in seen] == [torch.int32, torch.int32]
    seen.clear()
    given = dict.fromkeys(name for name in kernel.arg_names if name not in constants)
    call = CallLauncher(KernelCall(kernel, (1,), given, constants, {}))
    for grid in ((2,), (3,)):
        call.run({}, grid)
    assert [named["grid"] for _, named in seen] == [(2,), (3,)]


def _compiled(function: Callable[..., Any], in_graphs: list[Any], **options: Any) -> Callable[..., Any]:
    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        in_graphs.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    return torch.compile(function, backend=backend, **options)


def test_torch_compile_calls_launches_and_keeps_the_graphs_around_them(launches) -> None:
    """It would give up on a whole function that looks at an address, and compile what launches in its place."""
    in_graphs: list[Any] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        row, _ = quantize.quantize_both(x * 4, MX, None)
        assert row is not None
        return gemm.gemm_nt(row, x * 3, out_dtype=torch.bfloat16) * 5

    compiled, events = _compiled(layer, in_graphs), []
    with torch.no_grad():
        for function in (layer, compiled):
            launches.clear()
            for rows in (64, 64, 128, 64):
                assert function(torch.zeros(rows, 128, dtype=torch.bfloat16)).shape == (rows, rows)
            events.append([(name, grid) for name, grid, _, _ in launches])
    torch._dynamo.reset()
    assert events[0] == events[1]
    assert in_graphs.count(operator.mul) >= 3


def test_a_norm_is_in_the_graph_of_torch_compile(launches, monkeypatch) -> None:
    """The compiler takes its kernels themselves, and nothing is kept that saw a traced tensor."""
    import torch._dynamo.variables.builder as builder

    for module in (torch.utils._triton, builder):
        for name in ("has_triton", "has_triton_package"):
            monkeypatch.setattr(module, name, lambda *_: True, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: H200)  # one that dynamo does not know
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(norm, "warp_size", lambda _: 32)
    weight, in_graphs = torch.zeros(128), []

    def layer(x: torch.Tensor) -> torch.Tensor:
        y, rstd = norm.rms_norm_fwd(x * 2, weight, 1e-5)
        return norm.rms_norm_bwd(y * 3, x, weight, rstd)[0] * 4

    compiled, events = _compiled(layer, in_graphs, fullgraph=True), []
    with torch.no_grad():
        for function in (compiled, layer):
            launches.clear()
            for rows in (64, 64, 128, 64):
                assert function(torch.zeros(rows, 128, dtype=torch.bfloat16)).shape == (rows, 128)
            events.append([(name, grid) for name, grid, _, _ in launches])
            assert len(norm._FORWARD) == len(norm._BACKWARD) == (2 if function is layer else 0)
    torch._dynamo.reset()
    assert events[0] == events[1]
    assert len(events[0]) == 12
    assert in_graphs.count(operator.mul) >= 3


def test_an_epsilon_that_is_an_integer_is_not_compiled_into_the_kernel(launches) -> None:
    """Triton makes a constant of 1, which the next epsilon would be ignored for."""
    x, weight = torch.zeros(32, 128, dtype=torch.bfloat16), torch.zeros(128)
    norm.rms_norm_fwd(x, weight, 1)
    fused.rms_norm_quantize(x, weight, 1, MX, None)
    kept = [compiled_for["eps"] for _, _, _, compiled_for in launches if "eps" in compiled_for]
    assert kept == ["a float"] * 2


def test_integers_that_differ_from_call_to_call_are_not_specialised() -> None:
    """A kernel compiled for a word that is a multiple of 16, or 1, would be wrong for the next word."""
    for kernel in (quantize_shared_kernel, quantize_kernel, expert_fp8_kernel):
        words = {parameter.name for parameter in kernel.params if parameter.name[4:] in ("k0", "k1", "c2", "c3")}
        assert len(words) == 8
        assert {parameter.name for parameter in kernel.params if parameter.do_not_specialize} == words


def test_random_bits_are_those_of_each_call(launches) -> None:
    x = torch.zeros(128, 128, dtype=torch.bfloat16)
    keys = [RoundingKey(seed=1, draw=draw, tensor=3, rank=2) for draw in range(3)]
    for key in keys:
        quantize.quantize_both(x, STOCHASTIC, STOCHASTIC, key=key)
    for key, (_, _, args, _) in zip(keys, launches, strict=True):
        got = [args[f"{side}_{word}"] % (1 << 32) for side in ("row", "col") for word in ("k0", "k1", "c2", "c3")]
        assert got == [*key.words(), *key.words(True)]
    with pytest.raises(ConfigError, match="RoundingKey"):
        quantize.quantize_both(x, STOCHASTIC, STOCHASTIC)
    with pytest.raises(ConfigError, match="RoundingKey"):
        fused.quantize_and_sum(x, STOCHASTIC, None)


def test_nothing_keeps_a_tensor(launches) -> None:
    def call() -> list[weakref.ref[Any]]:
        x, weight = torch.zeros(128, 128, dtype=torch.bfloat16), torch.zeros(128)
        made = [
            *quantize.quantize_both(x, ONE_SCALE, ROWWISE), *fused.rms_norm_quantize(x, weight, 1e-5, MX, MX),
            *norm.layer_norm_fwd(x, weight, weight, 1e-5), *norm.rms_norm_bwd(x, x, weight, torch.zeros(128)),
            gemm.gemm_nt(x, x, out_dtype=torch.bfloat16),
            grouped_gemm.grouped_gemm_nt(x, x[None], Groups(torch.zeros(2, dtype=torch.int64), 128), out_dtype=x.dtype),
        ]  # fmt: skip
        tensors = [part for one in made for part in ([one.data, one.block_scale] if hasattr(one, "spec") else [one])]
        passed = [arg for _, _, args, _ in launches for arg in args.values() if isinstance(arg, torch.Tensor)]
        launches.clear()
        return [weakref.ref(tensor) for tensor in (x, weight, *tensors, *passed)]

    alive = call() + call()
    gc.collect()
    assert [ref for ref in alive if ref() is not None] == []


def test_threads_do_not_mix_their_tensors(launches) -> None:
    """Backward runs in threads of autograd; here eight of them meet an empty cache at once."""
    sizes, wrong = [128, 256, 384], []

    def work(start: int) -> None:
        for step in range(30):
            size = sizes[(start + step) % 3]
            row, col = quantize.quantize_both(torch.zeros(size, 128, dtype=torch.bfloat16), MX, MX_ROTATED)
            if row.shape != (size, 128) or col.shape != (128, size) or row.data.shape != (size, 64):
                wrong.append((size, row.shape, col.shape))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(start,)) for start in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert len(launches) == 8 * 30
    for _, (tiles, _, _), args, _ in launches:
        rows = args["rows"]
        assert args["x_ptr"].shape[0] == args["row_data"].shape[0] == rows == tiles * 128


def test_facts_tell_apart_what_a_kernel_is_compiled_for(monkeypatch) -> None:
    x = torch.zeros(64, 80)
    others = [
        x.bfloat16(),
        x[:, :64],
        x.t().contiguous().t(),
        torch.zeros(64 * 80 + 1)[1:].view(64, 80),
        x[:63],
        x[None],
    ]
    assert len({launching.facts(one) for one in [x, None, *others]}) == len(others) + 2
    assert launching.facts(x) == launching.facts(torch.ones(64, 80))
    monkeypatch.setattr(launching, "_ON_ROCM", True)  # where Triton asks whether offsets fit in 31 bits
    wide = torch.empty((1 << 31) + 64 * 80, dtype=torch.uint8, device="meta")
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: 0)
    assert launching.facts(wide[: 64 * 80]) != launching.facts(torch.empty(64 * 80, dtype=torch.uint8, device="meta"))


def test_answers_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(launching, "_MOST_ANSWERS", 3)
    answers: Answers[int] = Answers()
    for question in range(10):
        assert answers.keep(question, -question) == -question
        assert len(answers) <= 3
        assert answers[question] == -question


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 127, 128])
def test_two_amax_buffers_are_aligned_and_apart(rows) -> None:
    plans = [CopyPlan.of(rows, 24, ROWWISE, False), CopyPlan.of(rows, 24, ONE_SCALE, True)]
    for row, col in (
        plans,
        plans[::-1],
        (plans[0], None),
        (None, plans[1]),
        (CopyPlan.of(rows, 24, MX, False), plans[1]),
    ):
        buffers = amax_buffers(row, col, torch.device("cpu"))
        for number, (plan, buffer) in enumerate(zip((row, col), buffers)):
            wanted = 0 if plan is None else plan.amax_size
            assert (buffer is not None) == bool(wanted)
            if buffer is not None:
                assert buffer.data_ptr() % 16 == 0
                assert not buffer.any()
                buffer[:wanted] = number + 1
        for number, (plan, buffer) in enumerate(zip((row, col), buffers)):
            if buffer is not None and plan is not None:
                assert buffer[: plan.amax_size].eq(number + 1).all()


def test_results_are_no_part_of_a_graph(launches) -> None:
    """Also where a caller has gradients on, as in a direct call."""
    x = torch.zeros(128, 128, dtype=torch.bfloat16, requires_grad=True)
    odd = torch.zeros(128 * 128 + 1, dtype=torch.bfloat16, requires_grad=True)[1:].view(128, 128)
    weight = torch.zeros(128, requires_grad=True)
    for given in (x, odd, x.float(), x.t()):
        made = [*quantize.quantize_both(given, ONE_SCALE, MX), *norm.rms_norm_fwd(given, weight, 1e-5)]
        made += norm.layer_norm_bwd(given, given, weight, torch.zeros(128), torch.zeros(128))
        if given.dtype is torch.bfloat16:
            made += fused.rms_norm_quantize(given, weight, 1e-5, MX, MX) + fused.quantize_and_sum(given, MX, MX)
            made += [gemm.gemm_nt(given, given, out_dtype=torch.bfloat16)]
        tensors = [part for one in made for part in ([one.data, one.block_scale] if hasattr(one, "spec") else [one])]
        assert not any(tensor.requires_grad for tensor in tensors)
