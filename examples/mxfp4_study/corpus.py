"""Text that the machine has already: the sources and documents of its Python installation, as tokens.

    documents  every .py, .md, .rst, .txt, .pyi, .h, .cpp... file below the standard library and the installed packages, each text
               once, in an order derived from its content, so that the last two percent (validation) are a fair sample
    tokens     a byte-level BPE trained on a sample of these; token 0 ends a document

Same files, same arguments: same tokens. Their hash is written into every result, so that runs on different texts are never
compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
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
_VALIDATION = 0.02
_SAMPLE = 20_000_000
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
    facts = {"vocab": vocab, "max_characters": max_characters, "roots": [str(r) for r in roots or _roots()]}
    path = folder / "corpus.npz"
    if path.exists():
        stored = np.load(path)
        if json.loads(str(stored["facts"])) == facts:
            return _corpus(stored["train"], stored["validation"], vocab)
    texts = list(_documents(roots or _roots(), max_characters))
    sample, total = [], 0
    for text in texts:
        sample.append(text)
        total += len(text)
        if total > _SAMPLE:
            break
    tokenizer = train_tokenizer(sample, vocab)
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    encoded = [np.array([*one.ids, end], dtype=np.uint16) for one in tokenizer.encode_batch_fast(texts)]
    cut = max(1, int(len(encoded) * _VALIDATION))
    if len(encoded) < 2:
        raise ConfigError(
            f"corpus: {len(encoded)} documents below {facts['roots']}; take more characters or other roots."
        )
    train, validation = np.concatenate(encoded[:-cut]), np.concatenate(encoded[-cut:])
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "corpus.partial.npz"
    np.savez(partial, train=train, validation=validation, facts=json.dumps(facts))
    os.replace(partial, path)
    return _corpus(train, validation, vocab)


def _corpus(train: np.ndarray, validation: np.ndarray, vocab: int) -> Corpus:
    digest = hashlib.sha256(train.tobytes() + validation.tobytes()).hexdigest()[:16]
    return Corpus(train=train, validation=validation, vocab=vocab, digest=digest)


def _roots() -> list[Path]:
    paths = sysconfig.get_paths()
    return sorted({Path(paths["stdlib"]), Path(paths["purelib"]), Path(paths["platlib"])})


def _documents(roots: list[Path], max_characters: int) -> Iterator[str]:
    """Each text once, in the order of its hash, up to `max_characters` in all."""
    texts: dict[str, str] = {}
    for path in _files(roots):
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if _SHORTEST <= len(text) <= _LONGEST:
            texts.setdefault(hashlib.sha256(text.encode()).hexdigest(), text)
    total = 0
    for key in sorted(texts):
        if total + len(texts[key]) > max_characters:
            break
        total += len(texts[key])
        yield texts[key]


def _files(roots: list[Path]) -> Iterator[Path]:
    for root in roots:
        for folder, subfolders, files in os.walk(root):
            subfolders[:] = sorted(name for name in subfolders if name != "__pycache__")
            for name in sorted(files):
                if os.path.splitext(name)[1] in SUFFIXES:
                    yield Path(folder) / name


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
