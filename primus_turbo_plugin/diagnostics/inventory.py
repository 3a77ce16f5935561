"""What is installed and which variables are set: facts gathered without importing what they are about."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from primus_turbo_plugin import __version__
from primus_turbo_plugin.precision.config_sources import VARIABLES

DISTRIBUTION = "primus-turbo-plugin"

#: Component -> (distributions that provide it, what it is for, how to get it).
COMPONENTS: Mapping[str, tuple[tuple[str, ...], str, str]] = {
    "torch": (("torch",), "everything", "pip install torch (ROCm builds: https://pytorch.org/get-started)"),
    "triton": (
        ("triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton"),
        "GPU kernels",
        "it comes with the CUDA and ROCm builds of torch",
    ),
    "megatron-core": (
        ("megatron-core", "megatron_core"),
        "models and parallelism",
        "pip install 'megatron-core>=0.16'",
    ),
    "transformer-engine": (
        ("transformer-engine", "transformer_engine"),
        "components set to transformer_engine",
        "pip install transformer-engine[pytorch]",
    ),
}

#: Variables of other software that change what this package does -> how.
WATCHED_VARIABLES: Mapping[str, str] = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "order of copies and kernels; Megatron's overlaps ask for 1",
    "GPU_MAX_HW_QUEUES": "hardware queues (ROCm); 1 puts copies behind kernels",
    "CUDA_VISIBLE_DEVICES": "which GPUs torch sees",
    "HIP_VISIBLE_DEVICES": "which GPUs torch sees (ROCm)",
    "ROCR_VISIBLE_DEVICES": "which GPUs the ROCm runtime sees",
    "HSA_OVERRIDE_GFX_VERSION": "makes the runtime report another AMD architecture",
    "TORCHDYNAMO_DISABLE": "turns torch.compile off",
    "TRITON_INTERPRET": "runs Triton kernels in its interpreter, which computes bf16 wrongly",
    "TRITON_CACHE_DIR": "where compiled kernels are kept",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """An installed or missing piece of software.

    Attributes:
        name: Key of `COMPONENTS`.
        version: None where it is not installed.
        needed_for: What works only with it.
        problem: Why what is installed will not do, as measured by this package's own requirements; None if it will.
        remedy: How to get it.
    """

    name: str
    version: str | None
    needed_for: str
    problem: str | None
    remedy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """The software side of a report.

    Attributes:
        package: Version of this package.
        python: Version of Python.
        platform: Operating system and machine.
        components: In the order of `COMPONENTS`.
        megatron_training: Whether `megatron.training`, which the entry scripts need, can be imported.
        variables: (name, value, meaning) of those that are set.
        patches: Changes made to other packages at run time; this package makes none.
    """

    package: str
    python: str
    platform: str
    components: tuple[Component, ...]
    megatron_training: bool
    variables: tuple[tuple[str, str, str], ...]
    patches: tuple[str, ...] = ()

    def component(self, name: str) -> Component:
        """The component of that name."""
        return next(item for item in self.components if item.name == name)


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def own_requirements() -> dict[str, Requirement]:
    """This package's unconditional requirements by name; empty where it runs from a source tree that is not installed."""
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    requirements = [Requirement(line) for line in lines]
    return {item.name: item for item in requirements if item.marker is None}


def has_megatron_training() -> bool:
    """Whether `megatron.training` is there, found without running any of Megatron."""
    spec = importlib.util.find_spec("megatron")
    folders = list(spec.submodule_search_locations or []) if spec else []
    return any(Path(folder, "training", "__init__.py").exists() for folder in folders)


def take_inventory(
    environ: Mapping[str, str],
    *,
    version_of: Callable[[str], str | None] = installed_version,
    requirements: Mapping[str, Requirement] | None = None,
    megatron_training: bool | None = None,
) -> Inventory:
    """The inventory; the keyword arguments stand in for the machine in tests."""
    requirements = own_requirements() if requirements is None else requirements
    meanings = {**VARIABLES, **WATCHED_VARIABLES}
    return Inventory(
        package=__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        components=tuple(_component(name, version_of, requirements) for name in COMPONENTS),
        megatron_training=has_megatron_training() if megatron_training is None else megatron_training,
        variables=tuple((name, environ[name], meaning) for name, meaning in meanings.items() if name in environ),
    )


def _component(
    name: str, version_of: Callable[[str], str | None], requirements: Mapping[str, Requirement]
) -> Component:
    distributions, needed_for, remedy = COMPONENTS[name]
    version = next((found for found in map(version_of, distributions) if found), None)
    requirement = requirements.get(name)
    problem = None
    if requirement is not None and version is None:
        problem = f"{requirement} is required and not installed"
    elif (
        requirement is not None
        and version is not None
        and not requirement.specifier.contains(version, prereleases=True)
    ):
        problem = f"{requirement} is required, {version} is installed"
    return Component(name=name, version=version, needed_for=needed_for, problem=problem, remedy=remedy)
