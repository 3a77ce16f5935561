"""Checkpoint keys: written as Transformer Engine writes them, read as any of Megatron's specs wrote them.

Megatron's specs disagree on the keys of some norms: whether one is a module of its own or part of the linear behind it shows
in its key, and `sharded_state_dict_keys_map` hides that only for dense layers without MLA. For a mixture of experts, for MLA's
dense layers and for MLA's latent norms, a checkpoint of the local spec has other keys than one of the Transformer Engine spec.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.transformer.transformer_layer import TransformerLayer

from primus_turbo_plugin.specs.schedule_begins import AnnouncesSchedules

#: Module of a norm that stands alone -> start of its keys where it is part of the linear behind it.
FUSED_NAMES = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm": "self_attention.linear_kv_up_proj.layer_norm_",
}
_LAYER_PREFIX = re.compile(r"^.*?\blayers\.(?:\d+\.)?(?:(?:transformer_layer|mtp_model_layer)\.)?")


def other_name(key: str) -> str | None:
    """The key under which the other spec stores the same norm, or None if `key` is no such norm's."""
    for alone, fused in FUSED_NAMES.items():
        if f"{alone}." in key:
            return key.replace(f"{alone}.", fused, 1)
        if fused in key:
            return key.replace(fused, f"{alone}.", 1)
    return None


class CheckpointKeys:
    """The keys of one distributed checkpoint.

    Args:
        folder: The checkpoint's folder (`.../iter_0000100`). Read at the first use, once a process.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = str(folder)
        self._keys: tuple[frozenset[str], frozenset[str]] | None = None

    def rename(self, sharded_state_dict: Any, *, of_layer: bool = False) -> dict[str, str]:
        """Gives the norms in `sharded_state_dict` the keys they have in the checkpoint; others are left alone.

        Args:
            sharded_state_dict: Of a model or an optimizer, or of a layer; changed in place.
            of_layer: The keys carry a layer's number within its stage, as a layer makes them before the block gives them
                their place in the model. They are then looked for in any layer of the checkpoint: Megatron's local spec, whose
                checkpoints need this, names a norm alike in dense layers and in a mixture of experts.

        Returns:
            The keys that were changed, old -> new.
        """
        keys, tails = self._read()
        renamed: dict[str, str] = {}
        for item in nested_values(sharded_state_dict):
            if not isinstance(item, ShardedBase) or (item.key in keys and not of_layer):
                continue
            other = other_name(item.key)
            if other is None:
                continue
            is_elsewhere = _tail(other) in tails and _tail(item.key) not in tails
            if is_elsewhere or (other in keys and not of_layer):
                renamed[item.key] = other
                item.key = other
        return renamed

    def _read(self) -> tuple[frozenset[str], frozenset[str]]:
        """All keys; and all without the prefix of their layer."""
        if self._keys is None:
            keys = frozenset(dist_checkpointing.load_tensors_metadata(self.folder))
            self._keys = keys, frozenset(map(_tail, keys))
        return self._keys


def _tail(key: str) -> str:
    return _LAYER_PREFIX.sub("", key, count=1)


def match_checkpoint_keys(sharded_state_dict: Any, folder: str | Path) -> dict[str, str]:
    """Renames the norms of `sharded_state_dict` to what the checkpoint in `folder` calls them; call it before the load.

    Works for a model of any spec, Megatron's own included, so it is also the way back: a checkpoint written here loads in
    a model of Megatron's local spec.

    Returns:
        The keys that were changed, old -> new.
    """
    return CheckpointKeys(folder).rename(sharded_state_dict)


def checkpoint_to_read(load: str | Path | None, step: int | None = None) -> CheckpointKeys | None:
    """The keys of the checkpoint that Megatron-LM's `--load` (and `--ckpt-step`) stands for, or None if there is none.

    A folder that holds no distributed checkpoint (yet) gives None: what is wrong with it is Megatron's to say.
    """
    if load is None:
        return None
    folder = Path(load)
    if not _is_checkpoint(folder):
        tracker = folder / "latest_checkpointed_iteration.txt"
        if step is None and tracker.is_file():
            text = tracker.read_text().strip()
            step = int(text) if text.isdigit() else None
            folder = folder / "release" if text == "release" else folder
        if step is not None:
            folder = folder / f"iter_{step:07d}"
    return CheckpointKeys(folder) if _is_checkpoint(folder) else None


def _is_checkpoint(folder: Path) -> bool:
    return (folder / "metadata.json").is_file() and (folder / ".metadata").is_file()


class TurboTransformerLayer(AnnouncesSchedules, TransformerLayer):
    """Megatron's layer, reading checkpoints of either of Megatron's specs; its linears learn when a schedule begins.

    Until a state dict has been loaded, `sharded_state_dict` uses the keys of `checkpoint`; from then on (and without one)
    those of Transformer Engine. Plain state dicts with the other spec's norm names load too.

    Args:
        checkpoint: Keys of the checkpoint about to be loaded.
        *args, **kwargs: As TransformerLayer takes them.
    """

    def __init__(self, *args: Any, checkpoint: CheckpointKeys | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._checkpoint = checkpoint

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None) -> Any:
        """As TransformerLayer's, with the keys described above."""
        sharded = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self._checkpoint is not None:
            self._checkpoint.rename(sharded, of_layer=True)
        return sharded

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        self._checkpoint = None
        for name, _ in [*self.named_parameters(), *self.named_buffers()]:
            other = other_name(name)
            if other is not None and prefix + name not in state_dict and prefix + other in state_dict:
                state_dict[prefix + name] = state_dict.pop(prefix + other)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
