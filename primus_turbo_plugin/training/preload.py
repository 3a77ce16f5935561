"""Imports Megatron without the warnings it prints on import; nothing is computed.

The server that training processes are forked from imports this once, a process started otherwise before it trains.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings

# Without a GPU, torch mentions on import that it found a CUDA toolkit but no GPU.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in (
        "megatron.training",
        "megatron.training.models",
        "primus_turbo_plugin.specs.gpt",
        "primus_turbo_plugin.training.pretrain",
    ):
        with contextlib.suppress(ModuleNotFoundError):  # the process that needs it says what is missing
            importlib.import_module(name)
