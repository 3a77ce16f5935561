"""Whether all ranks of a job have chosen alike: compared through the job's store, without a collective.

The first rank that decides something writes it down under the topic's name; every other compares its own decision with that and
raises where they differ. Nobody waits for anybody, so ranks may ask at different times, or (pipeline stages) about different
topics. A rank that raises ends the job, as launchers end all ranks when one fails.
"""

from __future__ import annotations

import hashlib
import json
import socket
import weakref
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from primus_turbo_plugin.errors import ConfigError

REMEDY = (
    "Give all ranks the same configuration and tuning file (PRIMUS_TURBO_CONFIG, PRIMUS_TURBO_TUNING and the files they name) "
    "and the same software; `primus-turbo doctor` on both hosts shows what differs."
)
_PREFIX = "primus_turbo_plugin/agreement"

_answers: weakref.WeakKeyDictionary[dist.Store, dict[str, dict[str, tuple[int, bool]]]] = weakref.WeakKeyDictionary()
"""Job -> topic -> this process's answers so far: the place of each among them, and whether the others' is the same. Kept as long
as the job's store, whose port would stay taken if something held it longer."""


def agree(topic: str, choices: Mapping[str, str]) -> None:
    """Compares this rank's choices with the first rank's; asks the store once for each new answer of this process.

    A topic may be decided again, differently, later in a job (a second model): the n-th distinct answers are compared.

    Args:
        topic: What is decided, the same text on every rank that decides it.
        choices: What this rank has decided, as a reader should see it.

    Raises:
        ConfigError: Another rank decided otherwise; names both ranks, their hosts, what differs and the remedy.
    """
    store = _store()
    if store is None:
        return
    mine = {"rank": dist.get_rank(), "host": socket.gethostname(), "choices": dict(choices)}
    text = json.dumps(mine["choices"], sort_keys=True)
    answers = _answers.setdefault(store, {}).setdefault(topic, {})
    index, agreed = answers.setdefault(text, (len(answers), False))
    if agreed:
        return
    name = hashlib.sha256(topic.encode()).hexdigest()[:24]
    first = json.loads(store.compare_set(f"{_PREFIX}/{name}/{index}", "", json.dumps(mine)))
    if first["choices"] != mine["choices"]:
        raise ConfigError(_difference(topic, first, mine))
    answers[text] = index, True


def _store() -> dist.Store | None:
    """The store that the ranks met through; None for a job of one, and where a process group has none (MPI, fake)."""
    if (
        not dist.is_available()
        or not dist.is_initialized()
        or dist.get_world_size() == 1
        or dist.get_backend() == "fake"
    ):
        return None
    store: dist.Store | None = dist.distributed_c10d._get_default_store()  # no public name, from torch 1.10 to 2.14
    return store


def _difference(topic: str, first: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    names = sorted(set(first["choices"]) | set(mine["choices"]))
    differ = [name for name in names if first["choices"].get(name) != mine["choices"].get(name)]
    lines = [f"ranks of this job differ in {topic}."]
    for rank in (first, mine):
        said = "; ".join(f"{name}: {rank['choices'].get(name, '-')}" for name in differ)
        lines.append(f"  rank {rank['rank']} on {rank['host']}: {said}")
    return "\n".join([*lines, REMEDY])
