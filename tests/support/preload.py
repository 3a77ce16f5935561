"""Imported once by the server that ranks are forked from: what most distributed tests need, and nothing that computes."""

from __future__ import annotations

import importlib

for _name in (
    "megatron.core",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.parallel_state",
    "megatron.core.pipeline_parallel",
    "megatron.core.tensor_parallel",
    "megatron.core.transformer",
):
    try:
        importlib.import_module(_name)
    except ImportError:  # the test that needs it will say so
        break
