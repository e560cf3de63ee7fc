"""The tokenizer: text there and back, text that arrives token by token, and files that are not what they should be."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from fixtures import EOS, PAD, SENTENCES, TOKENIZER_SIZE, edit_json, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from minimoe.errors import InputError
from minimoe.tokenizer import REPLACEMENT, TextStream, Tokenizer

PUBLISHED = Path(__file__).parents[2] / "shared/data/tokenizer/gpt-neox-olmo-dolma-v1_5.json"
SAMPLES = (
    *SENTENCES,
    "",
    " ",
    "a🙂é한",
    "  two  spaces\n\n\ttab",
    "naïve café 한국어 👩‍👩‍👧‍👦 ½ ﬁ",
    "<|end",
    "\ufffd \ufffd",
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def published() -> Tokenizer:
    """OLMoE's own tokenizer, where it is at hand."""
    if not PUBLISHED.is_file():
        pytest.skip("the published tokenizer is not here")
    return Tokenizer(tokenizers.Tokenizer.from_file(str(PUBLISHED)), {}, None)


@pytest.fixture(params=["small", "published"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    chosen: Tokenizer = request.getfixturevalue(request.param)
    return chosen


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """One piece a token, and what is left at the end."""
    stream = TextStream(tokenizer)
    return [*(stream.push(token) for token in ids), stream.finish()]


@pytest.mark.parametrize("text", SAMPLES)
def test_text_comes_back_whole_in_one_piece_and_in_many(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_stream_gives_every_character_with_its_last_token_and_never_a_part(tokenizer: Tokenizer) -> None:
    text = "The fox 🙂 said: a🙂é한 👩‍👩‍👧‍👦!"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text.split())
    pieces = streamed(tokenizer, ids)
    assert all(REPLACEMENT not in piece for piece in pieces)
    for count in range(len(ids) + 1):
        given, whole = "".join(pieces[:count]), tokenizer.decode(ids[:count])
        assert whole.startswith(given)
        assert given == whole or whole.endswith(REPLACEMENT)
    assert pieces[-1] == ""


# Tokens of single bytes that start, continue or break a character; the special ones; and ids past the vocabulary.
def awkward_ids(tokenizer: Tokenizer, size: int) -> st.SearchStrategy[int]:
    characters = "🙂é한\ufffd"
    parts = sorted({token for c in characters for token in tokenizer.encode(c)} | {EOS, PAD})
    return st.sampled_from(parts) | st.integers(0, size + 9)


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_the_stream_of_any_tokens_is_the_decoded_whole(small: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(awkward_ids(small, TOKENIZER_SIZE), max_size=30))
    assert "".join(streamed(small, ids)) == small.decode(ids)


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_the_stream_of_any_published_tokens_is_the_decoded_whole(published: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(awkward_ids(published, published.vocab_size), max_size=30))
    assert "".join(streamed(published, ids)) == published.decode(ids)


def test_bytes_that_never_become_a_character_come_out_at_the_end(small: Tokenizer) -> None:
    ids = small.encode("🙂")[:-1]
    assert streamed(small, ids)[:-1] == [""] * len(ids)
    assert streamed(small, ids)[-1] == small.decode(ids)
    assert REPLACEMENT in small.decode(ids)


def test_special_tokens_are_not_seen(small: Tokenizer) -> None:
    ids = [EOS, *small.encode("fox"), PAD, *small.encode("🙂"), EOS]
    assert small.decode(ids) == "fox🙂"
    assert "".join(streamed(small, ids)) == "fox🙂"
    assert streamed(small, [EOS, PAD]) == ["", "", ""]
    split = small.encode("🙂")
    assert "".join(streamed(small, [split[0], EOS, *split[1:]])) == "🙂"


def test_a_stream_keeps_the_spaces_that_a_decoder_drops_at_the_start_of_a_text() -> None:
    vocabulary = {"▁The": 0, "▁fox": 1, "es": 2, "▁": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="▁"))
    backend.decoder = tokenizers.decoders.Metaspace()
    words = Tokenizer(backend, {}, None)
    assert words.decode([0, 1, 2, 1, 0]) == "The foxes fox The"
    assert streamed(words, [0, 1, 2, 1, 0]) == ["The", " fox", "es", " fox", " The", ""]


def test_what_is_neither_text_nor_ids_is_refused(small: Tokenizer) -> None:
    for ids in ([-1], [2**80], ["a"], [None]):
        with pytest.raises(InputError, match="whole numbers of at least 0"):
            small.decode(ids)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="not NoneType"):
        small.encode(None)  # type: ignore[arg-type]


def test_ids_past_the_tokenizer_have_no_text(small: Tokenizer) -> None:
    """Models have larger vocabularies than their tokenizers; such an id is possible, and no error."""
    assert small.decode([TOKENIZER_SIZE, *small.encode("owl"), TOKENIZER_SIZE + 23]) == "owl"


def test_encoding_is_that_of_transformers_and_adds_nothing(folder: Path) -> None:
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in SAMPLES:
        assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.encode("") == []
    assert (ours.vocab_size, len(theirs)) == (TOKENIZER_SIZE, TOKENIZER_SIZE)


def test_the_published_tokenizer_has_the_size_and_ends_that_are_known(published: Tokenizer) -> None:
    assert published.vocab_size == 50280
    assert published.token_id("<|endoftext|>") == 50279
    assert published.token_id("<|padding|>") == 1
    assert published.encode("") == []
    assert published.decode([50279, *published.encode("The sky"), 1]) == "The sky"


def test_a_tokenizer_file_that_asks_for_truncation_and_padding_gets_neither(folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    long = Tokenizer.from_folder(folder).encode(SENTENCES[0])
    backend.enable_truncation(4)
    backend.enable_padding(length=200)
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.from_folder(folder).encode(SENTENCES[0]) == long
    assert len(long) > 4


def test_token_ids_by_text(small: Tokenizer) -> None:
    assert small.token_id("<|endoftext|>") == EOS
    assert small.token_id("<|absent|>") is None
    assert small.token_id(None) is None


@pytest.mark.parametrize("text", ["\ud83d", "a\udcffb"])
def test_half_a_surrogate_pair_is_refused(small: Tokenizer, text: str) -> None:
    with pytest.raises(InputError, match="not valid Unicode"):
        small.encode(text)


@pytest.mark.parametrize("value", ["<|padding|>", {"content": "<|padding|>", "__type": "AddedToken"}])
def test_bos_and_eos_are_texts_or_objects(folder: Path, value: Any) -> None:
    edit_json(folder / "tokenizer_config.json", {"bos_token": value, "eos_token": None})
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|padding|>", None)


def test_settings_are_optional(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template) == (None, None, None)
    assert tokenizer.decode(tokenizer.encode("The fox")) == "The fox"


def test_a_missing_tokenizer_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{tmp_path} has no tokenizer.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"version": "1.0"}', b"version https://git-lfs\n", b"\xff\x00"])
def test_a_broken_tokenizer_names_file_and_size(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(InputError, match=rf"tokenizer.json \({len(content)} bytes\) is not a tokenizer"):
        Tokenizer.from_folder(folder)


def test_an_empty_tokenizer_or_a_pointer_to_one_says_so(folder: Path) -> None:
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (folder / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
        with pytest.raises(InputError, match=f"{name} is a Git LFS pointer"):
            Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_bytes(b"")
    with pytest.raises(InputError, match=r"tokenizer.json is empty \(0 bytes\)"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"3", b"[" * 200_000])
def test_broken_settings_name_the_file(folder: Path, content: bytes) -> None:
    (folder / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(InputError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bos_token", 5),
        ("eos_token", ["<|endoftext|>"]),
        ("eos_token", {"content": 3}),
        ("chat_template", 5),
        ("chat_template", {"default": "x"}),
        ("chat_template", [{"name": "default", "template": 3}]),
    ],
)
def test_settings_of_the_wrong_kind_are_refused_and_named(folder: Path, key: str, value: Any) -> None:
    edit_json(folder / "tokenizer_config.json", {key: value})
    with pytest.raises(InputError, match=f"tokenizer_config.json: {key} must be"):
        Tokenizer.from_folder(folder)


def test_reading_a_tokenizer_changes_no_file(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    Tokenizer.from_folder(folder).encode("The fox")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert json.loads(before["tokenizer.json"])["model"]["type"] == "BPE"
