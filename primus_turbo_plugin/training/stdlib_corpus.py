"""A dataset every machine has: the running Python's standard library, its sources and its language reference.

    documents  one source file, or one topic of `pydoc_data.topics` (what `help("assert")` shows), in an order derived from
               their names, so that the last few percent (the validation split) are a fair sample
    tokens     a byte-level BPE trained on these documents; token 0 ends a document
    files      PREFIX.bin and PREFIX.idx (Megatron's indexed dataset), tokenizer.json, corpus.json

Test packages are left out. Same Python, same arguments: same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from primus_turbo_plugin.errors import ConfigError

END_OF_DOCUMENT = "<|end|>"
PREFIX_NAME = "stdlib"
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "ensurepip"}
_MIN_CHARACTERS = 200
LARGEST_VOCAB = 65536  # tokens are stored as uint16
SMALLEST_VOCAB = 256 + 1 + 1  # bytes, end of document, and at least one merge


@dataclass(frozen=True, slots=True)
class Corpus:
    """What was written.

    Attributes:
        prefix: The dataset's path without `.bin` / `.idx`, as `--data-path` takes it.
        tokenizer: `tokenizer.json`, as the `tokenizers` library reads it.
        vocab_size: Tokens, the end of document included.
        documents: How many.
        tokens: How many, ends of documents included.
        characters: Of text.
    """

    prefix: str
    tokenizer: str
    vocab_size: int
    documents: int
    tokens: int
    characters: int


def documents(max_characters: int | None = None) -> list[str]:
    """The texts, in dataset order, cut off at `max_characters` in all."""
    named = dict(_topics()) | dict(_sources())
    order = sorted(named, key=lambda name: hashlib.sha256(name.encode()).digest())
    texts: list[str] = []
    total = 0
    for name in order:
        if max_characters is not None and texts and total + len(named[name]) > max_characters:
            break
        texts.append(named[name])
        total += len(named[name])
    return texts


def _topics() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    for name, text in topics.items():
        if len(text) >= _MIN_CHARACTERS:
            yield f"topic/{name}", text


def _sources() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in _LEFT_OUT)
        for file in sorted(files):
            path = Path(folder) / file
            name = path.relative_to(root).as_posix()
            if path.suffix != ".py" or name == "pydoc_data/topics.py":
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            if len(text) >= _MIN_CHARACTERS:
                yield name, text


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Any:
    """A byte-level BPE: every text can be encoded, and decodes to itself.

    Raises:
        ConfigError: `vocab_size` cannot hold the bytes, or the texts don't have so many distinct pieces.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if not SMALLEST_VOCAB <= vocab_size <= LARGEST_VOCAB:
        raise ConfigError(f"vocabulary: between {SMALLEST_VOCAB} and {LARGEST_VOCAB} tokens, got {vocab_size}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise ConfigError(
            f"vocabulary: {len(texts)} documents give {tokenizer.get_vocab_size()} tokens at most, {vocab_size} were "
            "asked for. Take more text, or a smaller vocabulary."
        )
    return tokenizer


def build(folder: Path, *, vocab_size: int, max_characters: int | None = None) -> Corpus:
    """Write the dataset and its tokenizer into `folder`, which must exist.

    Raises:
        ConfigError: The vocabulary doesn't fit the text.
    """
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    texts = documents(max_characters)
    tokenizer = train_tokenizer(texts, vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    prefix = folder / PREFIX_NAME
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    num_tokens = 0
    for encoding in tokenizer.encode_batch(texts):
        ids = [*encoding.ids, end]
        builder.add_document(torch.tensor(ids, dtype=torch.int64), [len(ids)])
        num_tokens += len(ids)
    builder.finalize(f"{prefix}.idx")
    corpus = Corpus(
        prefix=str(prefix),
        tokenizer=str(folder / "tokenizer.json"),
        vocab_size=vocab_size,
        documents=len(texts),
        tokens=num_tokens,
        characters=sum(map(len, texts)),
    )
    facts = {**asdict(corpus), "prefix": PREFIX_NAME, "tokenizer": "tokenizer.json", "python": sys.version.split()[0]}
    (folder / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n")
    return corpus
