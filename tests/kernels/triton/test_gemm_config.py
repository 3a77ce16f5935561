"""Configurations of the Triton GEMM as data: the default serves every product, refusals say why, keys tell products apart."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace

import pytest
import torch

from primus_turbo_plugin.devices import capabilities_of
from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.kernels.reference.quantize import quantize
from primus_turbo_plugin.kernels.requests import GemmRequest
from primus_turbo_plugin.kernels.triton import gemm, gemm_defaults
from primus_turbo_plugin.kernels.triton.gemm_config import GemmConfig, refusal, shared_memory_bytes
from primus_turbo_plugin.kernels.triton.gemm_key import GemmKey, OperandKey
from primus_turbo_plugin.precision.quant_spec import QuantSpec

UNITS = {
    "sm80": 108,
    "sm90": 132,
    "sm100": 148,
    "gfx942": 304,
    "gfx950": 256,
    "gfx1250": 256,
    "gfx90a": 110,
    "sm120": 84,
}
BF16 = OperandKey(element="bf16")
KINDS = {
    "bf16": BF16,
    "bf16 outer": replace(BF16, contiguous="outer"),
    "bf16 odd": replace(BF16, aligned=False),
    "bf16 strided": replace(BF16, contiguous="neither", aligned=False),
    "mxfp4": OperandKey(element="e2m1", block="1x32"),
    "mxfp8": OperandKey(element="e4m3", block="32x32"),
    "fp8 rowwise": OperandKey(element="e5m2", block="rowwise"),
    "fp8 blocks": OperandKey(element="e4m3", block="1x128"),
    "fp8 odd": OperandKey(element="e4m3", block="tensorwise", aligned=False),
}
SHAPES = [
    (1, 1, 1),
    (1, 17, 200),
    (64, 4096, 16384),
    (300, 260, 1000),
    (4096, 128, 4096),
    (16384, 28672, 4096),
    (3, 70_000, 64),
]


def key(
    arch: str = "sm90",
    a: OperandKey = BF16,
    b: OperandKey = BF16,
    shape: tuple[int, int, int] = (16384, 4096, 4096),
    **more: object,
) -> GemmKey:
    rows, cols, contraction = shape
    fields: dict[str, object] = {"out": "bf16"} | more
    return GemmKey(
        arch=arch, compute_units=UNITS[arch], rows=rows, cols=cols, contraction=contraction, a=a, b=b, **fields
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", UNITS)
def test_the_default_serves_every_product_and_is_the_first_candidate(arch) -> None:
    """Whatever a user multiplies, on whatever GPU: nothing reaches a kernel that cannot serve it."""
    epilogues = [
        {"out": "bf16", "bias": True},
        {"out": "fp32", "accumulate": True},
        {"out": "fp16", "out_aligned": False},
    ]
    for (left, right), shape, epilogue in itertools.product(
        itertools.product(KINDS.values(), repeat=2), SHAPES, epilogues
    ):
        product = key(arch, left, right, shape, **epilogue)
        config = gemm_defaults.default_config(product)
        assert refusal(product, config) is None, (str(product), config)


@pytest.mark.parametrize("arch", UNITS)
def test_candidates_and_struck_out_are_what_was_considered(arch) -> None:
    for left in ("bf16", "mxfp4", "fp8 blocks"):
        product = key(arch, KINDS[left], KINDS[left])
        kept, struck = gemm_defaults.candidates(product), gemm_defaults.struck_out(product)
        assert kept[0] == gemm_defaults.default_config(product)
        assert len(set(kept)) == len(kept) > 5
        assert all(reason for _, reason in struck)
        assert set(kept) | {config for config, _ in struck} == set(gemm_defaults.considered(product))
        assert not set(kept) & {config for config, _ in struck}


def test_the_default_knows_the_units_of_each_gpu() -> None:
    fp8, mx = KINDS["fp8 rowwise"], KINDS["mxfp4"]
    for arch in UNITS:
        encoding = capabilities_of(arch).fp8_encoding
        config = gemm_defaults.default_config(key(arch, fp8, fp8))
        assert (config.units, config.decode) == {
            "ocp": ("fp8", "tile"), "fnuz": ("fp8", "scratch"), None: ("half", "scratch")
        }[encoding]  # fmt: skip
        scaled = arch in ("gfx950", "gfx1250")
        config = gemm_defaults.default_config(key(arch, mx, mx))
        assert (config.units, config.decode) == (("mx", "tile") if scaled else ("half", "scratch"))
        assert gemm_defaults.default_config(key(arch, mx, BF16)).units == "half"


def test_hopper_uses_its_copy_engine_only_where_addresses_allow() -> None:
    assert gemm_defaults.default_config(key()).loads == "descriptors"
    assert gemm_defaults.default_config(key(a=KINDS["bf16 odd"])).loads == "pointers"
    assert gemm_defaults.default_config(key(b=KINDS["bf16 strided"])).loads == "pointers"
    assert gemm_defaults.default_config(key(out_aligned=False)).loads == "pointers"
    assert gemm_defaults.default_config(key("gfx950")).loads == "pointers"


def test_small_results_share_their_contraction_and_large_ones_do_not() -> None:
    assert gemm_defaults.default_config(key(shape=(128, 256, 16384))).split_k > 1
    assert gemm_defaults.default_config(key(shape=(128, 256, 64))).split_k == 1
    assert gemm_defaults.default_config(key()).split_k == 1


@pytest.mark.parametrize(("arch", "num_xcds"), [("gfx942", 8), ("gfx950", 8), ("sm90", 1), ("gfx1250", 1)])
def test_neighbouring_tiles_go_to_one_chiplet(arch, num_xcds) -> None:
    assert gemm_defaults.default_config(key(arch)).num_xcds == num_xcds


def test_scratch_is_counted() -> None:
    fp8 = GemmConfig(block_m=128, block_n=128, block_k=64, decode="scratch", units="fp8")
    product = key("gfx942", KINDS["fp8 rowwise"], KINDS["fp8 rowwise"], (10, 20, 64))
    assert fp8.scratch_bytes(product) == 30 * 64
    config = GemmConfig(block_m=128, block_n=128, block_k=64, decode="scratch", split_k=2)
    assert config.scratch_bytes(key(a=KINDS["mxfp4"], shape=(10, 20, 64))) == 2 * 10 * 64 + 4 * 2 * 10 * 20
    assert config.scratch_bytes(key(a=KINDS["mxfp4"], b=KINDS["mxfp4"], shape=(10, 20, 64))) == 2 * 30 * 64 + 1600


TMA = {"loads": "descriptors"}
TWO_FP8 = {"a": KINDS["fp8 rowwise"], "b": KINDS["fp8 rowwise"]}
REFUSED = [
    ("units fp8 multiply two FP8 operands", {}, {"units": "fp8"}),
    ("gfx942 read the FNUZ encoding, not OCP; decode: scratch", {"arch": "gfx942", **TWO_FP8}, {"units": "fp8"}),
    ("nothing is to be decoded", TWO_FP8, {"units": "fp8", "decode": "scratch"}),
    ("units mx multiply two MX operands", {"arch": "gfx950"}, {"units": "mx"}),
    ("sm90 has no scaled matrix units", {"a": KINDS["mxfp4"], "b": KINDS["mxfp4"]}, {"units": "mx"}),
    ("nothing is to be decoded", {}, {"decode": "scratch"}),
    ("gfx950 has no TMA", {"arch": "gfx950"}, TMA),
    ("a: address or row distance", {"a": KINDS["bf16 odd"]}, TMA),
    ("the result's address", {"out_aligned": False}, TMA),
    ("codes are decoded behind loads: pointers", {"a": KINDS["mxfp4"]}, TMA),
    ("split_k is for loads: pointers", {}, {**TMA, "split_k": 2}),
    ("FP8 blocks of 128 need block_k 128, got 64", {"a": KINDS["fp8 blocks"], "b": KINDS["fp8 blocks"]}, {}),
    ("belong to partial sums", {"a": KINDS["fp8 blocks"], "b": BF16}, {"decode": "scratch"}),
    ("MX blocks of 32 need block_k of at least 32, got 16", {"a": KINDS["mxfp4"]}, {"block_k": 16}),
    ("accumulators a thread", {}, {"block_m": 256, "block_n": 256, "num_warps": 4}),
    ("8 shares of 4 steps", {"shape": (16, 16, 256)}, {"split_k": 8}),
    ("KiB of shared memory, gfx942 has 64", {"arch": "gfx942"}, {"block_m": 256, "block_n": 256, "num_stages": 4}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "product", "config"), REFUSED, ids=[f"{index}" for index in range(len(REFUSED))])
def test_a_refusal_says_why(words, product, config) -> None:
    given = {"block_m": 64, "block_n": 64, "block_k": 64, "num_warps": 4} | config
    assert words in str(refusal(key(**product), GemmConfig(**given)))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("block_m", 96, "power of two, got 96"),
        ("split_k", 0, "at least 1, got 0"),
        ("units", "tf32", "half, fp8, mx, got 'tf32'"),
    ],
)
def test_a_field_is_checked_where_it_is_set(field, value, words) -> None:
    with pytest.raises(ConfigError, match=words):
        GemmConfig(**{"block_m": 64, "block_n": 64, "block_k": 64, field: value})


def test_shared_memory_counts_what_an_h200_reported() -> None:
    """One H200, Triton 3.6, 2026-12: 128x256x64, three stages and a result of 128x128 fp32 to add to need 279,608 bytes."""
    product = key(out="fp32", accumulate=True)
    config = GemmConfig(block_m=128, block_n=256, block_k=64, num_stages=3, epilogue_parts=2, persistent=True, **TMA)
    assert shared_memory_bytes(product, config) >= 279_608
    assert refusal(product, config) is not None
    assert refusal(product, replace(config, epilogue_parts=4)) is None


def test_a_configuration_survives_its_file_form() -> None:
    config = gemm_defaults.default_config(key())
    assert GemmConfig(**asdict(config)) == config


def test_keys_tell_apart_what_changes_code_or_choice() -> None:
    x = torch.zeros(64, 96, dtype=torch.bfloat16)
    kinds = [
        OperandKey.of(t)
        for t in (x, x.t().contiguous().t(), x[:, 1:], x[:, ::2], x.half(), quantize(x, QuantSpec(format="mxfp4")))
    ]
    assert len(set(kinds)) == 6
    assert [kind.contiguous for kind in kinds[:4]] == ["contraction", "outer", "contraction", "neither"]
    assert [kind.aligned for kind in kinds[:4]] == [True, True, False, False]
    repeated = x[:1].expand(64, -1)  # a loss that sums over tokens gives such a gradient
    assert not OperandKey.of(repeated).aligned
    assert not OperandKey.of(repeated.t()).aligned
    assert OperandKey.of(x[:1]).aligned
    turned = replace(BF16, contiguous="outer")
    assert [key(a=a, b=b).layout for a, b in ((BF16, BF16), (BF16, turned), (turned, turned), (turned, BF16))] == [
        "nt",
        "nn",
        "tn",
        "tt",
    ]
    assert str(key(a=KINDS["mxfp4"], bias=True)) == "gemm nt 16384x4096x4096 e2m1(1x32) x bf16 -> bf16 + bias on sm90"


def test_gfx950_gets_more_waves_from_a_triton_without_direct_copies(monkeypatch) -> None:
    for version, waves in (((3, 8), 4), ((3, 6), 8)):
        monkeypatch.setattr(gemm_defaults, "triton_version", lambda version=version: version)
        assert gemm_defaults.default_config(key("gfx950")).num_warps == waves


def test_a_triton_too_old_for_the_gpu_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gemm, "refusal", lambda device: None)
    monkeypatch.setattr(gemm, "gpu_of", lambda index: ("gfx1250", 256))
    request = GemmRequest(device="cuda", a=torch.bfloat16, b=torch.bfloat16, out_dtype=torch.bfloat16)
    monkeypatch.setattr(gemm, "triton_version", lambda: (3, 8))
    assert gemm.supports(request) is None
    monkeypatch.setattr(gemm, "triton_version", lambda: (3, 6))
    assert gemm.supports(request) == "needs Triton 3.8 on gfx1250, got 3.6"
