"""The `isa` and `emulate` commands."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from primus_turbo_plugin.amdgcn import commands
from primus_turbo_plugin.errors import ConfigError
from tests.amdgcn.single import kernel

HERE = Path(__file__).parent / "kernels"


def parsed(command: str, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    getattr(commands, f"add_{command}_arguments")(parser)
    return parser.parse_args(list(words))


def isa(*words: str) -> int:
    return commands.run_isa(parsed("isa", *words))


def emulate(*words: str) -> int:
    return commands.run_emulate(parsed("emulate", *words))


def test_isa_reports_on_an_assembly_file_without_triton(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.amdgcn"
    path.write_text(kernel("gfx950", ".L1:\ns_nop 0\ns_cbranch_scc1 .L1").asm)
    assert isa(str(path)) == 0
    assert "hot loop" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.py"], "no file 'nowhere.py'"),
        (["no.such.module"], "no module 'no.such.module'"),
        (["tests.amdgcn.single"], "has no isa_targets"),
    ],
)
def test_a_kernel_that_cannot_be_found_is_an_error(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        isa(*words)


class TestWithTriton:
    """What needs the compiler."""

    @pytest.fixture(autouse=True)
    def _triton(self) -> None:
        pytest.importorskip("triton", reason="Triton is not installed: no kernel can be compiled")

    def test_isa_prints_one_block_per_target_and_architecture(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert isa(str(HERE / "elementwise.py"), "--arch", "gfx950", "--arch", "gfx942") == 0
        blocks = capsys.readouterr().out.split("\n\n")
        assert [block.splitlines()[0] for block in blocks] == ["vector_add", "vector_add", "arithmetic", "arithmetic"]

    def test_isa_json_carries_the_gate(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert isa(f"{HERE / 'gemm.py'}:gemm_tdm_nt", "--json") == 0
        (entry,) = json.loads(capsys.readouterr().out)
        assert (entry["target"], entry["arch"], entry["gate_violations"]) == ("gemm_tdm_nt", "gfx1250", [])

    def test_isa_fails_on_a_violated_gate(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "strict.py"
        path.write_text(
            "import dataclasses\n"
            "from primus_turbo_plugin.amdgcn import IsaGate\n"
            "from tests.amdgcn.kernels.elementwise import isa_targets as original\n"
            "def isa_targets():\n"
            "    return [dataclasses.replace(original()[0], gate=IsaGate(required_anywhere=('v_mfma.*',)))]\n"
        )
        assert isa(str(path), "--arch", "gfx950") == 1
        assert "kernel lacks an instruction matching 'v_mfma.*'" in capsys.readouterr().out

    def test_isa_compiles_a_bare_kernel_with_arguments_from_the_command_line(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["--arg", "x_ptr=*fp32", "--arg", "y_ptr=*fp32", "--arg", "z_ptr=*fp32", "--arg", "n=i32"]
        words += ["--const", "BLOCK=1024", "--option", "num_warps=8", "--arch", "gfx950", "--asm"]
        assert isa(f"{HERE / 'elementwise.py'}:vector_add_without_tail_mask", *words) == 0
        out = capsys.readouterr().out
        assert "8 waves per work-group" in out
        assert ".amdhsa_kernel" in out

    def test_a_bare_kernel_needs_an_architecture(self) -> None:
        with pytest.raises(ConfigError, match="needs --arch"):
            isa(f"{HERE / 'elementwise.py'}:vector_add_without_tail_mask", "--const", "BLOCK=64")

    def test_emulate_reports_each_target(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert emulate(f"{HERE / 'elementwise.py'}:vector_add", "--seed", "5") == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 3
        assert all(line.startswith("ok   vector_add on gfx") and "(emulated)" in line for line in lines)

    def test_emulate_fails_on_a_wrong_kernel_and_says_what_is_wrong(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "wrong.py"
        path.write_text(
            "import dataclasses\n"
            "from tests.amdgcn.kernels import elementwise\n"
            "def isa_targets():\n"
            "    good = elementwise.isa_targets()[0]\n"
            "    bad = dataclasses.replace(good, name='tail', kernel=elementwise.vector_add_without_tail_mask)\n"
            "    off = dataclasses.replace(good, name='off', expected=lambda args: {'z_ptr': args['x_ptr']})\n"
            "    return [good, bad, off]\n"
        )
        assert emulate(str(path), "--arch", "gfx950", "--json") == 1
        good, bad, off = json.loads(capsys.readouterr().out)
        assert good["ok"]
        assert "out of bounds" in bad["problems"][0]
        assert "elements are wrong" in off["problems"][0]
        assert off["relative_error"]["z_ptr"] > 0

    def test_an_architecture_no_target_is_for_is_an_error(self) -> None:
        with pytest.raises(ConfigError, match="no target of"):
            emulate(f"{HERE / 'gemm.py'}:gemm_tdm_nt", "--arch", "gfx942")

    def test_a_target_that_does_not_exist_is_an_error_that_lists_those_that_do(self) -> None:
        with pytest.raises(ConfigError, match="it has vector_add, arithmetic"):
            emulate(f"{HERE / 'elementwise.py'}:nothing")

    def test_the_packages_own_kernels_are_known_by_name(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert isa("gfx1250_fp16_nt_small") == 0
        printed = capsys.readouterr().out
        assert "gate             passes" in printed
        assert "tensor_load_to_lds x2" in printed
        assert emulate("gfx1250_fp16_nt_small", "--seed", "3") == 0

    @pytest.mark.parametrize("command", [isa, emulate])
    def test_an_unknown_bare_name_lists_the_known_ones(self, command: Callable[..., int]) -> None:
        with pytest.raises(ConfigError, match=r"no built-in target 'gfx1250_bf17'.*gfx1250_bf16_nt, "):
            command("gfx1250_bf17")
