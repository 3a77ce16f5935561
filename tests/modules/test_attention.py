"""modules/attention.py: against Megatron's own DotProductAttention, and what that one refuses, on one rank."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.functional.attention_oracle import (
    allowed_keys,
    attention_float64,
    dropout_keep,
    packed_float64,
    relative_error,
)
from tests.support.distributed import RankInfo, ranks
from tests.support.linear import megatron_config, start_megatron

pytestmark = pytest.mark.megatron

FP32_BAR = 3e-6  # some dozen roundings of 2^-24
BF16_BAR = (
    0.04  # Megatron rounds scores and probabilities to bf16 between its two products: 2^-8 of scores up to eight or so
)


def _config(**fields: Any) -> Any:
    defaults = {"hidden_size": 48, "num_attention_heads": 6, "num_query_groups": 2, "attention_dropout": 0.0}
    return megatron_config(**(defaults | fields))


def _both(config: Any, mask_type: str = "causal", layer_number: int = 2) -> tuple[Any, Any]:
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from primus_turbo_plugin.modules import TurboDotProductAttention

    kind = AttnMaskType[mask_type]
    theirs = DotProductAttention(config, layer_number, kind, "self")
    return theirs, TurboDotProductAttention(config, layer_number, kind, "self")


def _turbo(config: Any, mask_type: str = "causal", **arguments: Any) -> Any:
    from megatron.core.transformer.enums import AttnMaskType

    from primus_turbo_plugin.modules import TurboDotProductAttention

    return TurboDotProductAttention(config, 2, AttnMaskType[mask_type], "self", **arguments)


def _qkv(config: Any, seq: int = 17, dtype: torch.dtype = torch.float32, keys: int | None = None) -> list[Tensor]:
    heads = (config.num_attention_heads, config.num_query_groups, config.num_query_groups)
    lengths = (seq, keys or seq, keys or seq)
    return [torch.randn(s, 2, h, 8).to(dtype).requires_grad_() for s, h in zip(lengths, heads)]


def _run(module: Any, qkv: list[Tensor], *arguments: Any, seed: int = 5, **keywords: Any) -> list[Tensor]:
    """out, dq, dk, dv and the parameters' gradients, with all generators reset before."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    out = module(*qkv, *arguments, **keywords)
    generator = torch.Generator().manual_seed(seed)
    dout = torch.randn(out.shape, generator=generator).to(out.dtype)
    return [out, *torch.autograd.grad(out, [*qkv, *module.parameters()], dout)]


def _assert_equal(theirs: list[Tensor], ours: list[Tensor], bar: float, what: Any) -> None:
    assert len(theirs) == len(ours)
    for position, (want, got) in enumerate(zip(theirs, ours)):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        assert relative_error(got, want) <= bar, (position, what)


VARIATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one group": {"num_query_groups": 1},
    "no groups": {"num_query_groups": 6},
    "window": {"window_size": (5, 0)},
    "window of other layers": {"window_size": (5, 0), "window_attn_skip_freq": 2},
    "window of this layer": {"window_size": (5, 0), "window_attn_skip_freq": [0, 1]},
    "learned sinks": {"softmax_type": "learnable"},
    "sinks of zero": {"softmax_type": "off-by-one"},
    "scaling by layer": {"apply_query_key_layer_scaling": True},
    "softmax scale": {"softmax_scale": 0.7},
    "softmax in low precision": {"attention_softmax_in_fp32": False},
}


@ranks(world_size=1, megatron=True)
@pytest.mark.parametrize("bf16", [False, True])
def test_equals_megatrons_own_module(rank_info: RankInfo, bf16: bool) -> None:
    start_megatron()
    dtype = torch.bfloat16 if bf16 else torch.float32
    for name, fields in VARIATIONS.items():
        config = _config(params_dtype=dtype, bf16=bf16, **fields)
        theirs, ours = _both(config)
        ours.load_state_dict(theirs.state_dict())
        qkv = _qkv(config, dtype=dtype)
        scale = fields.get("softmax_scale")
        if scale is not None:
            from primus_turbo_plugin.modules.attention import TurboDotProductAttention

            arguments = (2, theirs.attn_mask_type, "self")
            theirs = type(theirs)(config, *arguments, softmax_scale=scale)
            ours = TurboDotProductAttention(config, *arguments, softmax_scale=scale)
        _assert_equal(_run(theirs, qkv, None), _run(ours, qkv, None), BF16_BAR if bf16 else FP32_BAR, name)


@ranks(world_size=1, megatron=True)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_is_drawn_under_a_seed_of_the_tensor_parallel_generator(
    rank_info: RankInfo, sequence_parallel: bool
) -> None:
    """Under sequence parallelism the transformer block has entered that generator, and the module draws from what is current."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    start_megatron()
    config = _config(attention_dropout=0.3)
    config.sequence_parallel = sequence_parallel  # only read for the generator
    module = _turbo(config)
    qkv = _qkv(config)
    got = _run(module, qkv, None, seed=5)
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    with nullcontext() if sequence_parallel else get_cuda_rng_tracker().fork():
        seed = int(torch.randint(2**62, (1,)))
    copies = [x.detach().double().requires_grad_() for x in qkv]
    want, _ = attention_float64(
        *copies, scale=8**-0.5, allowed=allowed_keys(17, 17, causal=True)[None, None],
        keep=dropout_keep(seed, 0.3, (2, 6, 17, 17)), dropout=0.3,
    )  # type: ignore[arg-type]  # fmt: skip
    dout = torch.randn(got[0].shape, generator=torch.Generator().manual_seed(5)).double()
    grads = torch.autograd.grad(want.flatten(-2), copies, dout)
    _assert_equal([want.flatten(-2).float(), *(x.float() for x in grads)], got, FP32_BAR, "dropout")
    assert not torch.equal(_run(module, qkv, None, seed=6)[0], got[0])
    module.eval()
    assert torch.equal(_run(module, qkv, None, seed=1)[0], _run(module, qkv, None, seed=2)[0])


@ranks(world_size=1, megatron=True)
@pytest.mark.parametrize("mask_type", ["causal", "padding", "arbitrary", "no_mask", "padding_causal"])
def test_mask_tensors_mean_what_they_mean_to_megatrons_own_module(rank_info: RankInfo, mask_type: str) -> None:
    """Every mask here lies within causality, which the local module forgets once a mask is given."""
    start_megatron()
    config = _config()
    seq = 17
    future = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    documents = torch.tensor([0] * 6 + [1] * 11)
    other_document = documents[:, None] != documents[None, :]
    masks = {
        "none": None,
        "causal [1, 1, s, s]": future[None, None],
        "documents [b, 1, s, s]": torch.stack((future, future | other_document))[:, None],
    }
    if mask_type not in ("causal", "padding_causal"):
        lengths = torch.tensor([9, 17])
        masks["padding [b, 1, 1, s]"] = (torch.arange(seq) >= lengths[:, None])[:, None, None]
        masks["random [b, 1, s, s]"] = torch.rand(2, 1, seq, seq) < 0.5
        masks["random [b, 1, s, s]"][..., 0] = False  # a row that sees nothing differs
    theirs, ours = _both(config, mask_type)
    for name, mask in masks.items():
        if mask is None and mask_type == "padding_causal":
            continue  # the local module knows causality of `causal` alone
        qkv = _qkv(config, seq)
        _assert_equal(_run(theirs, qkv, mask), _run(ours, qkv, mask), FP32_BAR, name)


@ranks(world_size=1, megatron=True)
def test_a_mask_tensor_never_opens_the_future_of_a_causal_layer(rank_info: RankInfo) -> None:
    start_megatron()
    config = _config(window_size=(4, 0))
    for fields in ({}, {"window_size": (4, 0)}):
        module = _turbo(_config(**fields))
        qkv = _qkv(config)
        nothing_masked = torch.zeros(2, 1, 17, 17, dtype=torch.bool)
        _assert_equal(_run(module, qkv, None), _run(module, qkv, nothing_masked), 0.0, fields)


@ranks(world_size=1, megatron=True)
def test_a_row_that_sees_nothing_is_zero_where_megatrons_own_module_takes_the_mean(rank_info: RankInfo) -> None:
    start_megatron()
    config = _config()
    theirs, ours = _both(config, "arbitrary")
    qkv = _qkv(config, 5)
    mask = torch.zeros(2, 1, 5, 5, dtype=torch.bool)
    mask[1, 0, 3] = True
    want, got = theirs(*qkv, mask), ours(*qkv, mask)
    assert not got[3, 1].any()
    torch.testing.assert_close(want[3, 1].view(6, 8), qkv[2][:, 1].mean(0).repeat_interleave(3, 0))
    rest = torch.ones(5, 2, dtype=torch.bool)
    rest[3, 1] = False
    assert relative_error(got[rest], want[rest]) <= FP32_BAR
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(got.sum(), qkv))


@ranks(world_size=1, megatron=True)
def test_fewer_queries_than_keys_are_the_last_tokens(rank_info: RankInfo) -> None:
    """As with a key-value cache; one query sees every key, which is what the local module does."""
    start_megatron()
    config = _config()
    theirs, ours = _both(config)
    qkv = _qkv(config, 1, keys=9)
    _assert_equal(_run(theirs, qkv, None), _run(ours, qkv, None), FP32_BAR, "one query")
    for mask_type in ("causal", "causal_bottom_right"):
        q, k, v = _qkv(config, 4, keys=9)
        want, _ = attention_float64(q, k, v, scale=8**-0.5, allowed=allowed_keys(4, 9, causal=True)[None, None])
        assert relative_error(_turbo(config, mask_type)(q, k, v, None), want.flatten(2)) <= FP32_BAR
    windowed = _config(window_size=(2, 0))
    qkv = _qkv(windowed, 4, keys=9)
    theirs, ours = _both(windowed)
    _assert_equal(_run(theirs, qkv, None), _run(ours, qkv, None), FP32_BAR, "window")


@ranks(world_size=1, megatron=True)
def test_the_mask_type_given_to_forward_counts(rank_info: RankInfo) -> None:
    from megatron.core.transformer.enums import AttnMaskType

    start_megatron()
    config = _config()
    qkv = _qkv(config)
    full, causal = _turbo(config, "no_mask"), _turbo(config, "causal")
    got = full(*qkv, None, attn_mask_type=AttnMaskType.causal)
    assert torch.equal(got, causal(*qkv, None))
    assert not torch.equal(got, full(*qkv, None))


@ranks(world_size=1, megatron=True)
def test_a_bias_is_added_to_the_scores_and_gets_its_gradient(rank_info: RankInfo) -> None:
    start_megatron()
    config = _config()
    q, k, v = _qkv(config)
    bias = torch.randn(1, 6, 17, 17, requires_grad=True)
    out = _turbo(config)(q, k, v, None, attention_bias=bias)
    copies = [x.detach().double().requires_grad_() for x in (q, k, v, bias)]
    allowed = allowed_keys(17, 17, causal=True)[None, None]
    want, _ = attention_float64(*copies[:3], scale=8**-0.5, allowed=allowed, bias=copies[3])
    dout = torch.randn(out.shape)
    assert relative_error(out, want.flatten(2)) <= FP32_BAR
    grads = zip(
        torch.autograd.grad(out, (q, k, v, bias), dout), torch.autograd.grad(want.flatten(2), copies, dout.double())
    )
    assert all(relative_error(got, full) <= FP32_BAR for got, full in grads)


@ranks(world_size=1, megatron=True)
def test_values_may_be_narrower_than_queries(rank_info: RankInfo) -> None:
    """Multi-head latent attention: dim 12 for scores, 8 for values, a scale of its own."""
    start_megatron()
    config = _config(num_query_groups=6)
    q, k = (torch.randn(9, 2, 6, 12, requires_grad=True) for _ in range(2))
    v = torch.randn(9, 2, 6, 8, requires_grad=True)
    allowed = allowed_keys(9, 9, causal=True)[None, None]
    for scale in (None, 0.21):
        out = _turbo(config, k_channels=12, v_channels=8, softmax_scale=scale)(q, k, v, None)
        want, _ = attention_float64(q, k, v, scale=scale or 12**-0.5, allowed=allowed)
        assert out.shape == (9, 2, 48)
        assert relative_error(out, want.flatten(2)) <= FP32_BAR


@ranks(world_size=1, megatron=True)
@pytest.mark.parametrize("padded", [False, True])
def test_packed_sequences_do_not_see_each_other(rank_info: RankInfo, padded: bool) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    start_megatron()
    config = _config(window_size=(6, 0))
    lengths, rooms = [5, 9, 1], [8, 12, 4] if padded else [5, 9, 1]
    starts, ends = ([0, *torch.tensor(x).cumsum(0).tolist()] for x in (rooms, lengths))
    q, k, v = (torch.randn(sum(rooms), heads, 8, requires_grad=True) for heads in (6, 2, 2))
    ends_tensor, starts_tensor = (torch.tensor(x, dtype=torch.int32) for x in (ends, starts))
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends_tensor, cu_seqlens_kv=ends_tensor, max_seqlen_q=12, max_seqlen_kv=12,
        cu_seqlens_q_padded=starts_tensor if padded else None, cu_seqlens_kv_padded=starts_tensor if padded else None,
    )  # fmt: skip
    for mask_type in ("causal", "padding_causal"):
        out = _turbo(config, mask_type)(q, k, v, None, packed_seq_params=packed)
        copies = [x.detach().double().requires_grad_() for x in (q, k, v)]
        spans = [(start, length, start, length) for start, length in zip(starts, lengths)]
        want = packed_float64(*copies, spans, causal=True, window=(6, 0), scale=8**-0.5).flatten(1)
        assert out.shape == want.shape
        assert relative_error(out, want) <= FP32_BAR
        dout = torch.randn(out.shape)
        grads = zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(want, copies, dout.double()))
        assert all(relative_error(got, full) <= FP32_BAR for got, full in grads)


@ranks(world_size=1, megatron=True)
def test_packed_dropout_repeats_with_the_generator_and_keeps_the_mean(rank_info: RankInfo) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    start_megatron()
    config = _config(attention_dropout=0.25)
    lengths = torch.tensor([0, 30, 64], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
    q, k = torch.zeros(64, 6, 8, requires_grad=True), torch.zeros(64, 2, 8, requires_grad=True)
    v = torch.ones(64, 2, 8, requires_grad=True)
    module = _turbo(config, "no_mask")
    first, again, other = (_run(module, [q, k, v], None, packed_seq_params=packed, seed=s) for s in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not torch.equal(first[0], other[0])
    assert abs(first[0].mean().item() - 1.0) < 0.05
    assert first[0].std() > 0.05


@ranks(world_size=1, megatron=True)
def test_lengths_of_an_unpacked_batch_hide_its_padding(rank_info: RankInfo) -> None:
    """`sbhd` with cumulative lengths, as Megatron's multimodal models pass it."""
    from megatron.core.packed_seq_params import PackedSeqParams

    start_megatron()
    config = _config()
    qkv = _qkv(config, 9)
    lengths = torch.tensor([0, 5, 14], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="sbhd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
    padding = torch.arange(9) >= torch.tensor([[5], [9]])
    want = _turbo(config, "padding")(*qkv, padding[:, None, None])
    assert torch.equal(_turbo(config, "padding")(*qkv, None, packed_seq_params=packed), want)
    assert torch.equal(
        _turbo(config, "no_mask")(*qkv, None, packed_seq_params=packed), _turbo(config, "no_mask")(*qkv, None)
    )


@ranks(world_size=1, megatron=True)
def test_learned_sinks_start_and_are_saved_as_megatrons_own(rank_info: RankInfo) -> None:
    from megatron.core import parallel_state

    start_megatron()
    config = _config(softmax_type="learnable", init_method=lambda x: torch.nn.init.normal_(x, 0.3, 0.2))
    torch.manual_seed(11)
    theirs = _both(config)[0]
    torch.manual_seed(11)
    ours = _turbo(config)
    assert torch.equal(theirs.softmax_offset, ours.softmax_offset)
    assert list(theirs.state_dict()) == list(ours.state_dict()) == ["softmax_offset"]
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    saved = [m.sharded_state_dict("x.", (), metadata)["x.softmax_offset"] for m in (theirs, ours)]
    assert saved[0].global_shape == saved[1].global_shape == (6,)
    assert saved[0].replica_id == saved[1].replica_id
    assert ours.softmax_offset.tensor_model_parallel
    fixed = _turbo(_config(softmax_type="off-by-one"))
    assert not fixed.state_dict()
    assert not fixed.sharded_state_dict("x.")
    assert fixed.softmax_offset.tolist() == [0.0] * 6


@ranks(world_size=1, megatron=True)
def test_extra_state_of_transformer_engine_is_taken_and_dropped(rank_info: RankInfo) -> None:
    start_megatron()
    module = torch.nn.ModuleDict({"core_attention": _turbo(_config())})
    assert module.load_state_dict({"core_attention._extra_state": torch.empty(0)}, strict=True)
    assert not module.state_dict()


@ranks(world_size=1, megatron=True)
def test_recomputation_repeats_dropout_and_gradients(rank_info: RankInfo) -> None:
    from megatron.core.tensor_parallel import checkpoint

    start_megatron()
    config = _config(attention_dropout=0.4)
    module, qkv = _turbo(config), _qkv(config)

    class Recomputed(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
            return checkpoint(lambda *x: module(*x, None), False, q, k, v)

    for want, got in zip(_run(module, qkv, None), _backward(Recomputed(), qkv)):
        assert torch.equal(want, got)


@ranks(world_size=1, megatron=True)
def test_fp8_is_what_the_plan_or_megatrons_setting_says_also_under_recomputation(rank_info: RankInfo) -> None:
    from megatron.core.tensor_parallel import checkpoint

    from primus_turbo_plugin.precision.attention import AttentionPrecision
    from primus_turbo_plugin.precision.module_plan import ModulePlan

    start_megatron()
    config = _config(attention_dropout=0.4, bf16=True, params_dtype=torch.bfloat16)
    qkv = [x.detach().bfloat16().requires_grad_() for x in _qkv(config)]
    plan = ModulePlan(attention=AttentionPrecision(format="fp8"))
    module, plain = _turbo(config, plan=plan), _turbo(config)
    config = _config(attention_dropout=0.4, bf16=True, params_dtype=torch.bfloat16)
    config.fp8_dot_product_attention = True
    asked = _turbo(config)

    class Recomputed(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
            return checkpoint(lambda *x: module(*x, None), False, q, k, v)

    want = _run(module, qkv, None)
    for again in (_run(asked, qkv, None), _backward(Recomputed(), qkv)):
        assert all(torch.equal(a, b) for a, b in zip(want, again))
    for mine, exact in zip(want, _run(plain, qkv, None)):
        error = ((mine - exact).float().square().mean().sqrt() / exact.float().square().mean().sqrt()).item()
        assert 0.01 < error < 0.12  # dropout leaves fewer terms to average over


def _backward(module: Any, qkv: list[Tensor]) -> list[Tensor]:
    """As `_run`; checkpointing wants `.backward()`."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    out = module(*qkv, None)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    out.backward(dout)
    return [out.detach(), *(x.grad for x in qkv if x.grad is not None)]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "qk clip": ({"qk_clip": True}, {}, "qk_clip=True can't be honoured"),
    "max logit": ({"log_max_attention_logit": True}, {}, "log_max_attention_logit=True"),
    "fp8": ({"fp8_multi_head_attention": True}, {}, "fp8_multi_head_attention=True.*fp8_dot_product_attention"),
    "kitchen": ({"use_kitchen_attention": True}, {}, "use_kitchen_attention=True"),
    "batch invariance": ({"batch_invariant_mode": True}, {}, "batch_invariant_mode=True"),
    "another backend": ({"attention_backend": "flash"}, {}, "attention_backend=flash can't be honoured.*auto"),
    "softmax": ({"softmax_type": "sparse"}, {}, "vanilla, off-by-one or learnable, got 'sparse'"),
    "window ahead": ({"window_size": (4, 2)}, {}, r"2 tokens ahead and attn_mask_type=causal.*\(4, 0\)"),
    "window of three": ({"window_size": (4, 2, 1)}, {}, r"must be \(left, right\)"),
    "negative window": ({"window_size": (-2, 0)}, {}, "-1 for no limit"),
    "heads": ({"num_query_groups": 4, "num_attention_heads": 8}, {"tp": 3}, "num_attention_heads=8 must be divisible by.*=3"),
    "groups": ({"num_query_groups": 2, "num_attention_heads": 6}, {"tp": 3}, "num_query_groups=2 must be divisible by.*=3"),
    "probability": ({"attention_dropout": 1.5}, {}, "attention_dropout must be a probability, got 1.5"),
    "num_splits": ({}, {"num_splits": 4}, "num_splits=4"),
    "two levels": ({"context_parallel_size": 2}, {"cp_comm_type": "a2a+p2p"}, r"cp_comm_type=a2a\+p2p needs two levels"),
    "unknown transport": ({"context_parallel_size": 2}, {"cp_comm_type": "carrier"}, "must be p2p, all_gather.*'carrier'"),
    "unknown keyword": ({}, {"flavour": 1}, "unknown keyword 'flavour'"),
}  # fmt: skip


@ranks(world_size=1, megatron=True)
def test_settings_that_cannot_be_honoured_are_refused_by_name(rank_info: RankInfo) -> None:
    from megatron.core.transformer.enums import AttnBackend

    from primus_turbo_plugin.errors import ConfigError

    start_megatron()
    for fields, arguments, message in REFUSED.values():
        config = _config()
        for key, value in fields.items():  # set behind the constructor, which refuses some of them itself
            setattr(config, key, AttnBackend[value] if key == "attention_backend" else value)
        arguments = dict(arguments)
        if "tp" in arguments:
            arguments["pg_collection"] = _Groups(arguments.pop("tp"))
        with pytest.raises(ConfigError, match=message):
            _turbo(config, **arguments)


class _Groups:
    """Process groups of which only the size is asked for."""

    def __init__(self, tp: int) -> None:
        self.tp = self
        self._size = tp

    def size(self) -> int:
        return self._size


@ranks(world_size=1, megatron=True)
def test_calls_that_do_not_fit_are_refused_by_name(rank_info: RankInfo) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    from primus_turbo_plugin.errors import ConfigError, ShapeError, UnsupportedError

    start_megatron()
    config = _config()
    module, (q, k, v) = _turbo(config), _qkv(config)
    with pytest.raises(ShapeError, match="6 query heads and 2 key heads, got 2 and 2"):
        module(k, k, v, None)
    with pytest.raises(ConfigError, match="num_splits=2"):
        module(q, k, v, None, num_splits=2)
    with pytest.raises(UnsupportedError, match="argument 'qr'"):
        module(q, k, v, None, qr=q)
    module(q, k, v, None, qr=None)
    with pytest.raises(ShapeError, match="must be bool"):
        module(q, k, v, torch.zeros(1, 1, 17, 17))
    with pytest.raises(ShapeError, match="thd or sbhd, got 'bshd'"):
        module(q, k, v, None, packed_seq_params=PackedSeqParams(qkv_format="bshd"))
    with pytest.raises(ConfigError, match="local_cp_size=2"):
        module(q, k, v, None, packed_seq_params=PackedSeqParams(qkv_format="sbhd", local_cp_size=2))


@ranks(world_size=1, megatron=True)
def test_the_plan_says_which_kernels_serve(rank_info: RankInfo) -> None:
    from primus_turbo_plugin.errors import ConfigError, UnsupportedError
    from primus_turbo_plugin.precision.module_plan import KernelOrders, ModulePlan

    start_megatron()
    config = _config()
    order = KernelOrders.from_value({"attention": ["nobody"]})
    plan = ModulePlan(path="decoder.layers.1.self_attention.core_attention", kernels=order)
    with pytest.raises((ConfigError, UnsupportedError), match="nobody"):
        _turbo(config, plan=plan)(*_qkv(config), None)
    config.qk_clip = True
    with pytest.raises(ConfigError, match=r"decoder\.layers\.1\.self_attention\.core_attention: qk_clip"):
        _turbo(config, plan=plan)
