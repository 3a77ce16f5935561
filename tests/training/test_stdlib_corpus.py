"""The corpus: the same bytes every time, and tokens that decode to the text they came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.training import stdlib_corpus

CHARACTERS = 300_000


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> stdlib_corpus.Corpus:
    return stdlib_corpus.build(tmp_path_factory.mktemp("corpus"), vocab_size=512, max_characters=CHARACTERS)


def test_two_builds_write_the_same_bytes(corpus: stdlib_corpus.Corpus, tmp_path: Path) -> None:
    again = stdlib_corpus.build(tmp_path, vocab_size=512, max_characters=CHARACTERS)
    first, second = Path(corpus.prefix).parent, Path(again.prefix).parent
    for name in ("stdlib.bin", "stdlib.idx", "tokenizer.json", "corpus.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_tokens_read_by_megatron_decode_to_the_source_text(corpus: stdlib_corpus.Corpus) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(corpus.tokenizer)
    dataset = IndexedDataset(corpus.prefix)
    texts = stdlib_corpus.documents(CHARACTERS)
    assert len(dataset) == corpus.documents == len(texts)
    assert sum(len(ids) for ids in dataset) == corpus.tokens
    for ids, text in zip(dataset, texts):
        assert ids[-1] == tokenizer.token_to_id(stdlib_corpus.END_OF_DOCUMENT) == 0
        assert tokenizer.decode(list(ids[:-1])) == text


def test_documents_are_sources_and_topics_of_the_running_python_without_tests() -> None:
    import dataclasses
    import inspect
    from pydoc_data.topics import topics

    texts = stdlib_corpus.documents()
    assert inspect.getsource(dataclasses) in texts
    assert topics["assignment"] in texts
    assert not any("unittest.main()" in text and "class Test" in text and "test.support" in text for text in texts)
    assert sum(map(len, texts)) > 5_000_000


def test_taking_less_text_takes_a_prefix_of_the_documents() -> None:
    everything = stdlib_corpus.documents()
    some = stdlib_corpus.documents(CHARACTERS)
    assert some == everything[: len(some)]
    assert sum(map(len, some)) <= CHARACTERS


def test_the_facts_are_beside_the_files(corpus: stdlib_corpus.Corpus) -> None:
    facts = json.loads((Path(corpus.prefix).parent / "corpus.json").read_text())
    assert facts["prefix"] == "stdlib"  # relative: the folder may move
    assert (facts["tokens"], facts["vocab_size"]) == (corpus.tokens, 512)


@pytest.mark.parametrize("vocab_size", [1, 257, 65537])
def test_an_impossible_vocabulary_is_refused(vocab_size: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocabulary"):
        stdlib_corpus.build(tmp_path, vocab_size=vocab_size, max_characters=1000)


def test_a_vocabulary_the_text_cannot_fill_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Take more text"):
        stdlib_corpus.build(tmp_path, vocab_size=60_000, max_characters=50_000)
