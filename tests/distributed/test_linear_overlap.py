"""Linears whose collectives run under their GEMMs, against the same linears with one after the other, and against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.communication.overlap import Overlap, Payload
from primus_turbo_plugin.communication.transports.process_group import ProcessGroupTransport
from primus_turbo_plugin.communication.transports.shared_memory import SharedMemoryTransport
from primus_turbo_plugin.errors import UnsupportedError
from primus_turbo_plugin.functional.linear import linear
from primus_turbo_plugin.functional.linear_call import LinearCall, OverlapUse, TensorParallel
from primus_turbo_plugin.functional.wgrad import WgradQueue
from tests.support.distributed import RankInfo, ranks
from tests.support.linear import leaf, make_call, plan

K, N = 64, 96
CPU = torch.device("cpu")


def _overlap(chunks: int | None = 2, transport: str = "shared_memory", *, ring: bool = False) -> Overlap:
    kind = {"shared_memory": SharedMemoryTransport, "process_group": ProcessGroupTransport}[transport]
    return Overlap(kind(torch.distributed.group.WORLD, CPU), chunks=chunks, ring=ring)


def _exact(g: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    """Small integers: every sum is exact, so that results are equal in any order of addition."""
    return torch.randint(-2, 3, shape, generator=g).to(dtype)


def _shards(mode: str, info: RankInfo, g: torch.Generator, tokens: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, w, dy of this rank, of tensors that all ranks draw alike; tokens are those of a rank."""
    size, rank = info.world_size, info.rank
    x, w, dy = (_exact(g, *shape, dtype=dtype) for shape in ((tokens * size, K), (N, K), (tokens * size, N)))
    if mode == "column":
        return x.chunk(size)[rank], w.chunk(size)[rank], dy.chunk(size, 1)[rank].contiguous()
    return x.chunk(size, 1)[rank].contiguous(), w.chunk(size, 1)[rank].contiguous(), dy.chunk(size)[rank]


def _run(x: Tensor, w: Tensor, dy: Tensor, call: LinearCall) -> dict[str, Tensor]:
    leaves = leaf(x), leaf(w)
    y = linear(*leaves, None, call)
    y.backward(dy)
    return {"y": y.detach(), "dx": leaves[0].grad, "dw": leaves[1].grad}


@ranks(world_size=[2, 4])
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_overlapped_linears_give_the_bits_of_the_others(rank_info: RankInfo, transport: str) -> None:
    """Several layers back to back over one set of slots, twice: every recipe, both splits, every use of the overlap."""
    g = torch.Generator().manual_seed(rank_info.seed)
    overlap = _overlap(transport=transport)
    notes: set[tuple[str, str]] = set()
    note = lambda what, why: notes.add((what, why))  # noqa: E731
    for uses in (
        {},
        {"scatter_dgrad": True},
        {"gather": False, "bulk_scatter": False},
        {"scatter": False, "bulk_gather": False},
    ):
        for recipe in ("bf16", "mxfp4", "mxfp8", "fp8_rowwise", "fp8_block128"):
            for mode in ("column", "row"):
                dtype = torch.float32 if recipe == "bf16" else torch.bfloat16
                x, w, dy = _shards(mode, rank_info, g, 64, dtype)
                how = make_call(
                    plan(recipe),
                    dtype,
                    parallel=TensorParallel(mode=mode, group=torch.distributed.group.WORLD, sequence_parallel=True),
                )
                plain = _run(x, w, dy, how)
                use = OverlapUse(overlap=overlap, note=note, **uses)
                for _ in range(2):
                    ours = _run(x, w, dy, dataclasses.replace(how, overlap=use))
                    for name, value in plain.items():
                        assert torch.equal(ours[name], value), (recipe, mode, uses, name)
    assert ("fprop", "the blocks of x lie across ranks, so it is quantised after gathering") not in notes
    assert notes == set()


@ranks(world_size=[2, 3])
def test_gradients_quantised_on_arrival_or_after_gathering_give_the_same_bits(rank_info: RankInfo) -> None:
    """Where the columnwise copy needs all tokens: scales along tokens, blocks across ranks, a wgrad in BF16, one scale."""
    g, overlap = torch.Generator().manual_seed(rank_info.seed), _overlap()
    after = ("dgrad", "a copy of dy is made of all tokens, so dy is gathered first")
    plain_wgrad = plan("mxfp8", wgrad={"format": "bf16"})
    cases = {
        "fp8_rowwise": (plan("fp8_rowwise"), 33),
        "mxfp4": (plan("mxfp4"), 40),
        "mxfp8, plain wgrad": (plain_wgrad, 7),
    }
    cases["fp8_tensorwise"] = plan("fp8_tensorwise"), 32
    for name, (of, tokens) in cases.items():
        notes: set[tuple[str, str]] = set()
        use = OverlapUse(overlap=overlap, note=lambda what, why, notes=notes: notes.add((what, why)))
        x, w, dy = _shards("row", rank_info, g, tokens, torch.bfloat16)
        parallel = TensorParallel(mode="row", group=torch.distributed.group.WORLD, sequence_parallel=True)
        call = make_call(of, torch.bfloat16, parallel=parallel)
        expected = _run(x, w, dy, call)
        for _ in range(2):
            found = _run(x, w, dy, dataclasses.replace(call, overlap=use))
            assert all(torch.equal(found[key], value) for key, value in expected.items()), name
        assert (after in notes) == (name == "fp8_tensorwise"), (name, notes)


@ranks(world_size=2)
def test_scales_that_lie_as_gfx950_reads_them_give_the_same_bits(rank_info: RankInfo) -> None:
    """Rows of such scales cannot be cut where chunks and owners are: 80 tokens a rank are no multiple of 32."""
    g, overlap = torch.Generator().manual_seed(rank_info.seed), _overlap()
    for recipe in ("mxfp4", "mxfp8"):
        for mode in ("column", "row"):
            x, w, dy = _shards(mode, rank_info, g, 80, torch.bfloat16)
            parallel = TensorParallel(mode=mode, group=torch.distributed.group.WORLD, sequence_parallel=True)
            call = make_call(plan(recipe), torch.bfloat16, parallel=parallel)
            plain = _run(x, w, dy, call)
            kernels = dataclasses.replace(call.kernels, scale_layouts=dict.fromkeys(("x", "w", "dy"), "gfx950"))
            use = OverlapUse(overlap=overlap, scatter_dgrad=True)
            ours = _run(x, w, dy, dataclasses.replace(call, kernels=kernels, overlap=use))
            for name, value in plain.items():
                assert torch.equal(ours[name], value), (recipe, mode, name)


@ranks(world_size=[2, 3])
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_a_ring_gives_the_same_where_sums_are_exact(rank_info: RankInfo, transport: str) -> None:
    g = torch.Generator().manual_seed(rank_info.seed)
    notes: list[tuple[str, str]] = []
    use = OverlapUse(overlap=_overlap(transport=transport, ring=True), note=lambda *note: notes.append(note))
    for recipe in ("bf16", "mxfp8"):
        for mode in ("column", "row"):
            x, w, dy = _shards(mode, rank_info, g, 64, torch.bfloat16)
            parallel = TensorParallel(mode=mode, group=torch.distributed.group.WORLD, sequence_parallel=True)
            call = make_call(plan(recipe), torch.bfloat16, parallel=parallel)
            plain = _run(x, w, dy, call)
            for scatter_dgrad in (False, True):
                ours = _run(
                    x, w, dy, dataclasses.replace(call, overlap=dataclasses.replace(use, scatter_dgrad=scatter_dgrad))
                )
                for name, value in plain.items():
                    assert torch.equal(ours[name], value), (recipe, mode, scatter_dgrad, name)
    assert ("dx under wgrad", "a ring adds on its way, for which wgrad leaves no room") in notes


@ranks(world_size=[1, 3])
def test_tokens_in_any_number(rank_info: RankInfo) -> None:
    """One token, none, and a number that no chunk or block divides; a world of one has nothing to overlap."""
    g, overlap = torch.Generator().manual_seed(rank_info.seed), _overlap(chunks=3)
    use = OverlapUse(overlap=overlap)
    size = rank_info.world_size
    for tokens in (1, 0, 7, 2, 33):
        for mode in ("column", "row"):
            group = torch.distributed.group.WORLD
            x = _exact(g, tokens * size, 12, dtype=torch.float64)
            w, dy = _exact(g, 6, 12, dtype=torch.float64), _exact(g, tokens * size, 6, dtype=torch.float64)
            rank = rank_info.rank
            column = mode == "column"
            mine = x.chunk(size) if column else x.chunk(size, 1)
            weights, gradients = (w.chunk(size), dy.chunk(size, 1)) if column else (w.chunk(size, 1), dy.chunk(size))
            if tokens == 0:
                mine = mine if not column else (x,) * size
                gradients = gradients if column else (dy,) * size
            call = make_call(
                plan("bf16"),
                torch.float64,
                parallel=TensorParallel(mode=mode, group=group, sequence_parallel=True),
                overlap=use,
            )
            got = _run(mine[rank].contiguous(), weights[rank].contiguous(), gradients[rank].contiguous(), call)
            y, dx, dw = x @ w.t(), dy @ w, dy.t() @ x
            rows = slice(rank * tokens, (rank + 1) * tokens)
            assert torch.equal(got["y"], y.chunk(size, 1)[rank] if column else y[rows])
            assert torch.equal(got["dx"], dx[rows] if column else dx.chunk(size, 1)[rank])
            assert torch.equal(got["dw"], dw.chunk(size, 0 if column else 1)[rank])


@ranks(world_size=2)
def test_a_wgrad_that_is_put_off_outlives_the_slots(rank_info: RankInfo) -> None:
    """Three layers' gradients are computed after all of them have been through the same two slots."""
    g, overlap = torch.Generator().manual_seed(rank_info.seed), _overlap()
    for mode in ("column", "row"):
        queue, late, expected = WgradQueue(), [], []
        for _ in range(3):
            x, w, dy = _shards(mode, rank_info, g, 8, torch.float32)
            parallel = TensorParallel(mode=mode, group=torch.distributed.group.WORLD, sequence_parallel=True)
            expected.append(_run(x, w, dy, make_call(plan("bf16"), torch.float32, parallel=parallel))["dw"])

            def delay(compute: Any, queue: WgradQueue = queue, late: list[Tensor] = late) -> None:
                queue.put(compute, late.append)

            call = make_call(
                plan("bf16"), torch.float32, parallel=parallel, overlap=OverlapUse(overlap=overlap), delay=delay
            )
            _run(x, w, dy, call)
        queue.run()
        assert all(torch.equal(a, b) for a, b in zip(late, expected, strict=True))


@ranks(world_size=2)
def test_codes_of_a_wgrad_that_is_put_off_outlive_the_slots(rank_info: RankInfo) -> None:
    """Their scales too, where one row of blocks covers all features: stacked shards of one row lie side by side already."""
    g, overlap, size, rank = torch.Generator().manual_seed(rank_info.seed), _overlap(), 2, rank_info.rank
    of = plan("mxfp8", wgrad={"block": "32x32"})
    for mode in ("column", "row"):
        queue, late, expected = WgradQueue(), [], []

        def delay(compute: Any, queue: WgradQueue = queue, late: list[Tensor] = late) -> None:
            queue.put(compute, late.append)

        for layer in range(3):
            x, w, dy = (
                torch.randn(*shape, generator=g).mul(4.0**layer).bfloat16() for shape in ((64, 32), (32, 32), (64, 32))
            )
            if mode == "column":
                x, w, dy = x.chunk(size)[rank], w, dy.contiguous()
            else:
                w, dy = w.contiguous(), dy.chunk(size)[rank]
            parallel = TensorParallel(mode=mode, group=torch.distributed.group.WORLD, sequence_parallel=True)
            call = make_call(of, torch.bfloat16, parallel=parallel)
            expected.append(_run(x, w, dy, call)["dw"])
            _run(x, w, dy, dataclasses.replace(call, overlap=OverlapUse(overlap=overlap), delay=delay))
        queue.run()
        assert all(torch.equal(a, b) for a, b in zip(late, expected, strict=True)), mode


@ranks(world_size=2)
def test_out_of_memory_in_a_wgrad_leaves_the_overlap_usable(rank_info: RankInfo) -> None:
    """The transfers that it ran over are ended, on the rank that failed and on the one that did not."""
    g, use = torch.Generator().manual_seed(rank_info.seed), OverlapUse(overlap=_overlap())
    for mode in ("column", "row"):
        for failing in ((0, 1), (1,)):
            x, w, dy = _shards(mode, rank_info, g, 8, torch.float32)
            parallel = TensorParallel(mode=mode, group=torch.distributed.group.WORLD, sequence_parallel=True)
            plain = make_call(plan("bf16"), torch.float32, parallel=parallel)
            ours = dataclasses.replace(plain, overlap=use)

            def no_memory(compute: Any) -> Tensor:
                raise torch.OutOfMemoryError("CUDA out of memory")

            if rank_info.rank in failing:
                with pytest.raises(torch.OutOfMemoryError):
                    _run(x, w, dy, dataclasses.replace(ours, delay=no_memory))
            else:
                _run(x, w, dy, ours)
            found, expected = _run(x, w, dy, ours), _run(x, w, dy, plain)
            assert all(torch.equal(found[name], value) for name, value in expected.items())


@ranks(world_size=2)
def test_an_error_among_the_products_ends_the_overlap_by_name(rank_info: RankInfo) -> None:
    """Peers have not been sent what they wait for: going on would give them another call's rows."""
    overlap = _overlap()

    def no_memory(planes: list[Tensor], out: Tensor, add: Tensor | None) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    x, y = torch.ones(4, 8), torch.empty(4, 8)
    with pytest.raises(torch.OutOfMemoryError):
        overlap.gemm_scatter(Payload.plain(torch.ones(8, 8)), no_memory, y, 8, label="layers.0 fprop")
    with pytest.raises(
        UnsupportedError, match=r"layers.1: the overlap .* layers.0 fprop failed on this rank \(OutOfMem"
    ):
        overlap.start_scatter(torch.ones(8, 8), label="layers.1")
    assert torch.equal(
        overlap.start_gather(Payload.plain(x)).wait()[0], torch.ones(8, 8)
    )  # other channels have lost nothing


@ranks(world_size=2)
def test_frozen_weights_and_inputs_without_gradient(rank_info: RankInfo) -> None:
    """Without a wgrad to hide under, dx leaves as its products are made; without dx nothing is gathered for it."""
    g, use = torch.Generator().manual_seed(rank_info.seed), OverlapUse(overlap=_overlap())
    for mode in ("column", "row"):
        x, w, dy = _shards(mode, rank_info, g, 8, torch.float32)
        parallel = TensorParallel(mode=mode, group=torch.distributed.group.WORLD, sequence_parallel=True)
        plain = make_call(plan("bf16"), torch.float32, parallel=parallel)
        ours = make_call(plan("bf16"), torch.float32, parallel=parallel, overlap=use)
        for frozen in ("x", "w"):
            results = []
            for call in (plain, ours):
                leaves = leaf(x, frozen != "x"), leaf(w, frozen != "w")
                linear(*leaves, None, call).backward(dy)
                results.append([t.grad for t in leaves if t.grad is not None])
            assert torch.equal(*(r[0] for r in results))
            assert [len(r) for r in results] == [1, 1]


@ranks(world_size=2)
def test_nothing_saved_for_backward_lies_in_a_slot(rank_info: RankInfo) -> None:
    """A later call overwrites slots, so forward may keep only memory of its own."""
    g, overlap = torch.Generator().manual_seed(rank_info.seed), _overlap()
    arenas = (overlap._gathers, overlap._bulk, overlap._scatters)
    for recipe in ("bf16", "mxfp4"):
        for mode in ("column", "row"):
            saved: list[Tensor] = []
            x, w, dy = _shards(mode, rank_info, g, 64, torch.bfloat16)
            parallel = TensorParallel(mode=mode, group=torch.distributed.group.WORLD, sequence_parallel=True)
            call = make_call(plan(recipe), torch.bfloat16, parallel=parallel, overlap=OverlapUse(overlap=overlap))
            with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
                y = linear(leaf(x), leaf(w), None, call)
            y.backward(dy)
            owned = {t.untyped_storage().data_ptr() for t in saved}
            slots = {c._arena.mine.untyped_storage().data_ptr() for c in arenas if c._arena is not None}
            assert saved
            assert not owned & slots


def _compiled_step(x: Tensor, w: Tensor, call: LinearCall) -> Tensor:
    return torch.nn.functional.silu(linear(x * 2, w, None, call)) + 1


@ranks(world_size=2)
def test_compiled_code_around_an_overlapped_linear_gives_the_same_bits(rank_info: RankInfo) -> None:
    """The linear runs as it is, outside the graphs: its collectives may not be traced, nor traced once and replayed."""
    import torch._dynamo

    if torch._dynamo.config.disable:
        pytest.skip("TORCHDYNAMO_DISABLE is set")
    g, use = torch.Generator().manual_seed(rank_info.seed), OverlapUse(overlap=_overlap())
    for mode in ("column", "row"):
        x, w, dy = _shards(mode, rank_info, g, 8, torch.float32)
        parallel = TensorParallel(mode=mode, group=torch.distributed.group.WORLD, sequence_parallel=True)
        call = make_call(plan("bf16"), torch.float32, parallel=parallel, overlap=use)
        results = []
        for step in (_compiled_step, torch.compile(_compiled_step, backend="eager")):
            for _ in range(2):
                leaves = leaf(x), leaf(w)
                y = step(*leaves, call)
                y.backward(dy)
                results.append((y.detach(), leaves[0].grad, leaves[1].grad))
        for found in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))


@ranks(world_size=2)
def test_an_evaluation_may_come_before_training(rank_info: RankInfo) -> None:
    """Slots made in inference mode must be writable, by every thread, out of it."""
    g, use = torch.Generator().manual_seed(rank_info.seed), OverlapUse(overlap=_overlap())
    for mode in ("column", "row"):
        x, w, dy = _shards(mode, rank_info, g, 8, torch.float32)
        parallel = TensorParallel(mode=mode, group=torch.distributed.group.WORLD, sequence_parallel=True)
        plain = make_call(plan("bf16"), torch.float32, parallel=parallel)
        ours = dataclasses.replace(plain, overlap=use)
        expected = _run(x, w, dy, plain)
        with torch.inference_mode():
            assert torch.equal(linear(x.clone(), w.clone(), None, ours), expected["y"])
        for name, value in _run(x, w, dy, ours).items():
            assert torch.equal(value, expected[name])
        with torch.no_grad():
            assert torch.equal(linear(x, w, None, ours), expected["y"])
