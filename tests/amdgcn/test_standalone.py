"""The tool stands alone: no other room, no torch, and Triton only to compile."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from primus_turbo_plugin import amdgcn
from primus_turbo_plugin.amdgcn.compiler import compile as compile_kernel
from primus_turbo_plugin.errors import UnsupportedError

ROOT = Path(amdgcn.__file__).parent


def test_importing_everything_loads_neither_torch_nor_triton_nor_another_room() -> None:
    names = [path.relative_to(ROOT.parent.parent).with_suffix("") for path in sorted(ROOT.rglob("*.py"))]
    modules = [".".join(name.parts).removesuffix(".__init__") for name in names]
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "rooms = {name.split('.')[1] for name in sys.modules if name.startswith('primus_turbo_plugin.')}\n"
        "print(sorted(rooms), 'torch' in sys.modules, 'triton' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent.parent
    )
    assert result.stdout.strip() == "['amdgcn', 'errors'] False False"


def test_compiling_without_triton_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UnsupportedError, match="needs the `triton` package"):
        compile_kernel(None, "gfx950", {})


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx1250"])
def test_every_instruction_has_a_family_a_source_and_a_meaning(arch: str) -> None:
    opcodes = amdgcn.coverage(arch)
    assert len(opcodes) > 700
    for opcode in opcodes:
        assert opcode.family
        assert re.match(r"(CDNA|RDNA4|LLVM)", opcode.source), opcode.name
        assert len(opcode.meaning) > 3


def test_files_stay_small() -> None:
    sizes = {path.name: len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")}
    assert max(sizes.values()) <= 320, sizes
