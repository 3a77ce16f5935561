"""The one place that knows Megatron's releases.

Each fact below says what differs, and which release lets the fact (and the branch that reads it) be deleted: the first one
after the last that still needs it. Nothing outside this file compares versions, probes Megatron with `hasattr`, or wraps an
import of it in `try`; `tests/specs/test_compat.py` greps for that.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import sys
import warnings
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from primus_turbo_plugin.errors import UnsupportedError

OLDEST = Version("0.16")
#: Releases the tests of this package run against, oldest first (0.17 and 0.18 by hand before a release).
TESTED = ("0.16", "0.17", "0.18", "0.19")


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronFacts:
    """What differs between the supported releases of megatron-core.

    Attributes:
        version: The installed release.
        experts_are_a_pair: `grouped_mlp_modules` returns `(class, submodules)`, not a builder. Delete when 0.17 is the oldest.
        mtp_inner_slot: Field of `MultiTokenPredictionLayerSubmodules` that holds the layer: `transformer_layer`, then
            `mtp_model_layer`. Delete when 0.17 is the oldest.
        cp_comm_type_list_is_shifted: A list of `cp_comm_type` is indexed by the layer number from 1, so that each layer gets
            its successor's entry and the last one fails. Delete when 0.17 is the oldest.
        hybrid_package: Where the hybrid stack lives: `ssm.mamba_block`, then `models.hybrid`. Delete when 0.18 is the oldest.
    """

    version: Version
    experts_are_a_pair: bool
    mtp_inner_slot: str
    cp_comm_type_list_is_shifted: bool
    hybrid_package: str


def facts_of(version: Version) -> MegatronFacts:
    """The facts of one release.

    Raises:
        UnsupportedError: The release is older than `OLDEST`.
    """
    if version < OLDEST:
        raise UnsupportedError(
            f"megatron-core {version} is installed and this package needs {OLDEST} or newer (tested with {', '.join(TESTED)}). "
            f"Run 'pip install \"megatron-core>={OLDEST}\"', or update the Megatron-LM checkout."
        )
    if (version.major, version.minor) > _release(TESTED[-1]):
        warnings.warn(
            f"megatron-core {version} is newer than the releases this package was tested with ({', '.join(TESTED)}); "
            "settings it added are unknown here.",
            stacklevel=2,
        )
    minor = (version.major, version.minor)
    return MegatronFacts(
        version=version,
        experts_are_a_pair=minor < (0, 17),
        mtp_inner_slot="transformer_layer" if minor < (0, 17) else "mtp_model_layer",
        cp_comm_type_list_is_shifted=minor < (0, 17),
        hybrid_package="ssm.mamba_block" if minor < (0, 18) else "models.hybrid.hybrid_block",
    )


def _release(text: str) -> tuple[int, int]:
    return Version(text).major, Version(text).minor


@functools.cache
def facts() -> MegatronFacts:
    """The facts of the installed release.

    Raises:
        UnsupportedError: megatron-core is not installed, or too old.
    """
    try:
        info = importlib.import_module("megatron.core.package_info")
    except ImportError as error:
        raise UnsupportedError(
            f"megatron-core cannot be imported ({error}). Run 'pip install \"megatron-core>={OLDEST}\"', "
            "or put a Megatron-LM checkout on PYTHONPATH."
        ) from error
    return facts_of(Version(info.__shortversion__))


def transformer_engine_is_installed() -> bool:
    """Whether Transformer Engine can be imported; Megatron puts mocks in its place where it cannot."""
    return importlib.util.find_spec("transformer_engine") is not None


def experts(module: type, submodules: Any) -> Any:
    """What `BackendSpecProvider.grouped_mlp_modules` returns for `module` with `submodules`."""
    if facts().experts_are_a_pair:
        return module, submodules
    return functools.partial(module, submodules=submodules)


def mtp_layer_submodules(*, norm: Any, eh_proj: Any, layer: Any) -> Any:
    """`MultiTokenPredictionLayerSubmodules` with `layer` in the slot this release has for it."""
    module = importlib.import_module("megatron.core.transformer.multi_token_prediction")
    inner = {facts().mtp_inner_slot: layer}
    return module.MultiTokenPredictionLayerSubmodules(enorm=norm, hnorm=norm, eh_proj=eh_proj, layer_norm=norm, **inner)


def hybrid_classes() -> tuple[type, type]:
    """The hybrid stack and the dataclass of its submodules (`MambaStack` before 0.18)."""
    module = importlib.import_module(f"megatron.core.{facts().hybrid_package}")
    if facts().hybrid_package.startswith("ssm."):
        return module.MambaStack, module.MambaStackSubmodules
    return module.HybridStack, module.HybridStackSubmodules


def fill(submodules: type, **slots: Any) -> Any:
    """An instance of the dataclass `submodules` with those of `slots` that this release has."""
    known = {field.name for field in dataclasses.fields(submodules)}
    return submodules(**{slot: spec for slot, spec in slots.items() if slot in known})


def training_arguments() -> Any:
    """The parsed arguments of the Megatron-LM program that is running, or None if none is.

    A running program has imported `megatron.training`; importing it here would be slow, and impossible where it is absent.
    """
    module = sys.modules.get("megatron.training.global_vars")
    return None if module is None else module._GLOBAL_ARGS


def training_config() -> Any:
    """The `TransformerConfig` of the running Megatron-LM program, made from its arguments as its model builder makes it.

    Raises:
        UnsupportedError: No such program is running.
    """
    args = training_arguments()
    if args is None:
        raise UnsupportedError(
            "megatron_lm.gpt_spec is for Megatron-LM's --spec flag and no Megatron-LM program is running. "
            "Call primus_turbo_plugin.gpt_layer_spec(config) instead."
        )
    if getattr(args, "yaml_cfg", None) is not None:
        return importlib.import_module("megatron.training.yaml_arguments").core_transformer_config_from_yaml(
            args, "language_model"
        )
    return importlib.import_module("megatron.training.arguments").core_transformer_config_from_args(args)
