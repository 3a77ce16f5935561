"""Text that the machine has already: the sources and documents of its Python installation, as tokens.

    documents  .py, .md, .rst, .txt, .pyi, .h, .cpp... files below the standard library and the installed packages, each text
               once, in the order of a hash of their paths until there are characters enough: only those are read, and the last
               two percent (validation) are a fair sample
    tokens     a byte-level BPE trained on a sample of these; token 0 ends a document

Same files, same arguments: same tokens. Their hash is written into every result, so that runs on different texts are never
compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.training.stdlib_corpus import END_OF_DOCUMENT, train_tokenizer

SUFFIXES = {
    ".py",
    ".pyi",
    ".pyx",
    ".md",
    ".rst",
    ".txt",
    ".c",
    ".cc",
    ".cpp",
    ".cu",
    ".cuh",
    ".h",
    ".hpp",
    ".html",
    ".js",
}
_SHORTEST, _LONGEST = 200, 400_000
"""Characters. Longer files are tables and generated code."""
_READERS, _READ_AHEAD = 16, 2048
"""Threads that read, and files they are handed at a time."""
_VALIDATION = 0.02
_SAMPLE = 5_000_000
"""Characters that the tokenizer is trained on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Tokens for training and validation.

    Attributes:
        train: uint16 `[tokens]`.
        validation: uint16 `[tokens]`.
        vocab: Size of the vocabulary.
        digest: Of both; the identity of the data.
    """

    train: np.ndarray
    validation: np.ndarray
    vocab: int
    digest: str


def load(folder: Path, *, vocab: int, max_characters: int, roots: list[Path] | None = None) -> Corpus:
    """The corpus, from `folder` if it was built there before with these arguments, else built and written there.

    Raises:
        ConfigError: There is too little text for the vocabulary.
    """
    roots = roots or _roots()
    facts = {"vocab": vocab, "max_characters": max_characters, "roots": [str(root) for root in roots]}
    path = folder / "corpus.npz"
    if path.exists():
        stored = np.load(path)
        if json.loads(str(stored["facts"])) == facts:
            return _corpus(stored["train"], stored["validation"], vocab)
    start = time.monotonic()
    texts = list(_documents(roots, max_characters))
    if len(texts) < 2:
        raise ConfigError(
            f"corpus: {len(texts)} documents below {facts['roots']}; take more characters or other roots."
        )
    read = time.monotonic()
    tokenizer = train_tokenizer(_sample(texts), vocab)
    trained = time.monotonic()
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    encoded = []
    for first in range(0, len(texts), _READ_AHEAD):
        batches = tokenizer.encode_batch_fast(texts[first : first + _READ_AHEAD])
        encoded += [np.array([*one.ids, end], dtype=np.uint16) for one in batches]
    cut = max(1, int(len(encoded) * _VALIDATION))
    train, validation = np.concatenate(encoded[:-cut]), np.concatenate(encoded[-cut:])
    print(
        f"corpus: {len(texts)} documents read in {read - start:.0f} s, tokenizer trained in {trained - read:.0f} s, "
        f"encoded in {time.monotonic() - trained:.0f} s",
        flush=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "corpus.partial.npz"
    np.savez(partial, train=train, validation=validation, facts=json.dumps(facts))
    os.replace(partial, path)
    return _corpus(train, validation, vocab)


def _sample(texts: list[str]) -> list[str]:
    """The first of the texts, as many as have `_SAMPLE` characters."""
    total = 0
    for count, text in enumerate(texts, 1):
        total += len(text)
        if total > _SAMPLE:
            return texts[:count]
    return texts


def _corpus(train: np.ndarray, validation: np.ndarray, vocab: int) -> Corpus:
    digest = hashlib.sha256(train.tobytes() + validation.tobytes()).hexdigest()[:16]
    return Corpus(train=train, validation=validation, vocab=vocab, digest=digest)


def _roots() -> list[Path]:
    paths = sysconfig.get_paths()
    return sorted({Path(paths["stdlib"]), Path(paths["purelib"]), Path(paths["platlib"])})


def _documents(roots: list[Path], max_characters: int) -> Iterator[str]:
    """Each text once, in the order of its path's hash, up to `max_characters` in all."""
    order = sorted(_files(roots), key=lambda named: hashlib.sha256(named[0].encode()).digest())
    seen: set[bytes] = set()
    total = 0
    with ThreadPoolExecutor(_READERS) as readers:
        for first in range(0, len(order), _READ_AHEAD):
            for text in readers.map(_read, [path for _, path in order[first : first + _READ_AHEAD]]):
                digest = hashlib.sha256(text.encode()).digest()
                if not text or digest in seen:
                    continue
                seen.add(digest)
                total += len(text)
                if total > max_characters:
                    return
                yield text


def _read(path: str) -> str:
    """The text of a file; empty where it is none, or too short or long to learn from."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (UnicodeDecodeError, OSError):
        return ""
    return text if _SHORTEST <= len(text) <= _LONGEST else ""


def _files(roots: list[Path]) -> Iterator[tuple[str, str]]:
    """(name that does not depend on where the installation is, path)."""
    for number, root in enumerate(roots):
        for folder, subfolders, files in os.walk(root):
            subfolders[:] = [name for name in subfolders if name != "__pycache__"]
            for name in files:
                if os.path.splitext(name)[1] in SUFFIXES:
                    path = os.path.join(folder, name)
                    yield f"{number}/{path[len(str(root)) + 1 :]}", path


def batch(tokens: np.ndarray, *, seed: int, step: int, sequences: int, seq: int) -> np.ndarray:
    """int64 `[sequences, seq + 1]`: the batch of a step, a function of (seed, step) alone.

    The stream is cut into sequences; a permutation of them for every epoch, from the seed.
    """
    count = (len(tokens) - 1) // seq
    if count < 1:
        raise ConfigError(
            f"corpus: {len(tokens)} tokens hold no sequence of {seq} + 1. Take more text or a shorter --seq."
        )
    places = np.arange(step * sequences, (step + 1) * sequences)
    rows = np.empty(sequences, dtype=np.int64)
    for epoch in np.unique(places // count):
        order = np.random.default_rng([seed, int(epoch)]).permutation(count)
        here = places // count == epoch
        rows[here] = order[places[here] % count]
    return np.stack([tokens[row * seq : row * seq + seq + 1] for row in rows]).astype(np.int64)
