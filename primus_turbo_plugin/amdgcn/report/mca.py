"""LLVM MCA on a kernel's hot loop: a simulation of one wave by the compiler's own scheduling model.

Optional. It needs static LLVM 23 libraries with the AMDGPU target and a C++ compiler; the PyPI packages `mlc-llvm-static` and
`mlc-llvm-static-extra-targets` bring the libraries. The driver (mca_driver.cpp) is built once and kept.

What it is not: MCA knows issue rates, latencies and register dependencies of the scheduling model, but no caches, no LDS bank
conflicts, no other waves and no hardware measurement. CDNA only: gfx1250 code names registers above v255 in a way
the assembler does not read back. Its unit is a pass of four clocks. It charges 8-bit operands of the f8f6f4 instructions like
4-bit ones, half of what they take.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.compiled import CompiledKernel
from primus_turbo_plugin.amdgcn.emulator.isa.access import parse_width
from primus_turbo_plugin.amdgcn.report.loops import Loop, hot_loop
from primus_turbo_plugin.errors import UnsupportedError

_DRIVER = Path(__file__).with_name("mca_driver.cpp")
_AMDGPU = ("AMDGPUAsmParser", "AMDGPUDesc", "AMDGPUInfo", "AMDGPUUtils", "AMDGPUTargetMCA", "AMDGPUDisassembler")
_CORE = (
    "MCA", "MC", "MCParser", "MCDisassembler", "Object", "BinaryFormat", "Support", "TargetParser", "Demangle", "Core",
    "Remarks", "BitReader", "BitstreamReader", "TextAPI", "IRReader", "AsmParser", "DebugInfoCodeView", "DebugInfoDWARF",
    "DebugInfoDWARFLowLevel", "Analysis", "ProfileData", "SymbolicFile",
)  # fmt: skip
_MATRIX_UNIT = "HWXDL"
_CLOCKS_PER_CYCLE = 4
_ITERATIONS = 20


@dataclass(frozen=True, slots=True)
class McaResult:
    """Simulation of the hot loop, per iteration of one wave.

    Attributes:
        clocks: Clocks an iteration takes.
        matrix_clocks: Clocks the matrix unit is in use.
        instructions: Instructions simulated.
        skipped: Instructions MCA has no model for.
        resources: Clocks each processor resource is in use.
    """

    clocks: float
    matrix_clocks: float
    instructions: int
    skipped: int
    resources: dict[str, float]

    @property
    def matrix_share(self) -> float:
        """Share of the time the matrix unit is busy."""
        return self.matrix_clocks / self.clocks if self.clocks else 0.0


def find_llvm() -> Path:
    """Directory of static LLVM libraries with the AMDGPU target.

    Raises:
        UnsupportedError: They are not installed.
    """
    spec = importlib.util.find_spec("mlc_llvm_static")
    root = (
        Path(next(iter(spec.submodule_search_locations))) / "static"
        if spec and spec.submodule_search_locations
        else None
    )
    if root is None or not (root / "lib" / "libLLVMAMDGPUTargetMCA.a").is_file():
        raise UnsupportedError(
            "amdgcn: LLVM MCA needs the packages mlc-llvm-static and mlc-llvm-static-extra-targets (version 23), which are not "
            "installed; everything else in the report works without them."
        )
    return root


def build_driver(llvm: Path, cache: Path | None = None) -> Path:
    """Compile the driver against LLVM and return the program; built once per source and LLVM.

    Args:
        llvm: What `find_llvm` returned.
        cache: Where to keep it; by default the user's cache directory.

    Raises:
        UnsupportedError: There is no C++ compiler, or it fails.
    """
    key = hashlib.sha256(_DRIVER.read_bytes() + str(llvm).encode()).hexdigest()[:16]
    folder = cache or Path.home() / ".cache" / "primus-turbo"
    program = folder / f"mca-{key}"
    if program.is_file():
        return program
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise UnsupportedError("amdgcn: LLVM MCA needs a C++ compiler to build its driver, and none is on the path.")
    folder.mkdir(parents=True, exist_ok=True)
    libraries = [llvm / "lib" / f"libLLVM{name}.a" for name in (*_AMDGPU, *_CORE)]
    present = [str(path) for path in libraries if path.is_file()]
    extra = [str(path) for name in ("z", "zstd") if (path := llvm / "lib" / f"lib{name}.a").is_file()]
    command = [compiler, "-std=c++17", "-O1", "-fno-rtti", f"-I{llvm / 'include'}", str(_DRIVER), "-o", str(program)]
    command += ["-Wl,--start-group", *present, "-Wl,--end-group", *extra, "-lpthread", "-ldl"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise UnsupportedError(f"amdgcn: the MCA driver does not compile against {llvm}:\n{result.stderr[-2000:]}")
    return program


def _free_target(texts: list[str], count: int) -> tuple[str, int]:
    """Registers nobody in the loop touches, to receive what goes to LDS: used ones would look like a dependency.

    As many as asked for, or one where no run of that length is free (MCA's latency is the same); v255 as the last resort.
    """
    used: dict[str, set[int]] = {"v": set(), "a": set()}
    for kind, first, last, single in re.findall(r"\b([va])(?:\[(\d+):(\d+)\]|(\d+)\b)", " ".join(texts)):
        used[kind] |= set(range(int(first or single), int(last or single) + 1))
    for size in (count, 1):
        for kind, taken in used.items():
            for start in range(256 - size, -1, -1):
                if start % min(size, 2) == 0 and taken.isdisjoint(range(start, start + size)):
                    return (f"{kind}[{start}:{start + size - 1}]" if size > 1 else f"{kind}{start}"), size
    return "v255", 1


def _as_register_load(instruction: Instruction, texts: list[str]) -> str:
    """A transfer straight to LDS as a register load: MCA has no model for the former."""
    base, width = instruction.opcode.replace("_lds_", "_").rsplit("_", 1)
    target, size = _free_target(texts, parse_width(width).registers)
    rest = re.sub(r"\blds\b", "", instruction.text.partition(" ")[2])
    return f"{base}_{width if size == parse_width(width).registers else 'dword'} {target}, {rest.strip()}"


def loop_text(loop: Loop) -> str:
    """The loop as MCA takes it: without branches, transfers to LDS as register loads."""
    texts = [instruction.text for instruction in loop.instructions]
    lines = []
    for instruction in loop.instructions:
        if instruction.opcode.startswith(("s_branch", "s_cbranch")):
            continue
        to_lds = instruction.flag("lds") or "_load_lds_" in instruction.opcode
        lines.append(_as_register_load(instruction, texts) if to_lds else instruction.text)
    return "\n".join(lines) + "\n"


def run_mca(compiled: CompiledKernel, cache: Path | None = None) -> McaResult:
    """Simulate the hot loop.

    Raises:
        UnsupportedError: LLVM is missing, the target is not CDNA, or the kernel has no loop.
    """
    if not compiled.architecture.is_cdna:
        raise UnsupportedError(f"amdgcn: LLVM MCA is offered for gfx942 and gfx950 only, got {compiled.arch}.")
    loop = hot_loop(compiled.program)
    if loop is None:
        raise UnsupportedError(f"amdgcn: kernel {compiled.name!r} has no loop to simulate.")
    program = build_driver(find_llvm(), cache)
    command = [str(program), compiled.arch, str(_ITERATIONS)]
    result = subprocess.run(command, input=loop_text(loop), capture_output=True, text=True, check=False)
    if result.returncode:
        raise UnsupportedError(f"amdgcn: LLVM MCA failed on kernel {compiled.name!r}:\n{result.stderr[-2000:]}")
    data = json.loads(result.stdout)
    scale = _CLOCKS_PER_CYCLE / _ITERATIONS
    resources = {name: cycles * scale for name, cycles in data["resources"].items()}
    return McaResult(
        data["cycles"] * scale, resources.get(_MATRIX_UNIT, 0.0), data["instructions"], data["skipped"], resources
    )
