"""Texts of an analysis: read piece by piece, whole and in order; what cannot be read is named."""

from __future__ import annotations

import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures import SENTENCES
from hypothesis import given
from hypothesis import strategies as st

import minimoe
from minimoe.analysis import texts as texts_module
from minimoe.analysis.texts import Text, parse_texts, windows
from minimoe.engine import Engine
from minimoe.errors import InputError

TALES = " ".join(SENTENCES[:3])


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[..., Path]) -> Engine:
    return minimoe.load(checkpoint("top8_of_64"))


@given(
    st.lists(st.sampled_from(["a fox ", "river\n", "é한🙂", "\n\n", "x" * 9, "the sea is blue. "]), min_size=1),
    st.integers(1, 9),
    st.integers(3, 40),
)
def test_windows_are_the_whole_text_in_order(
    tmp_path_factory: pytest.TempPathFactory, engine: Engine, words: list[str], length: int, piece: int
) -> None:
    text = "".join(words)
    path = tmp_path_factory.mktemp("t") / "t.txt.xz"
    path.write_bytes(lzma.compress(text.encode()))
    before = texts_module.PIECE
    texts_module.PIECE = piece
    read: list[int] = []
    try:
        if not text.strip():
            with pytest.raises(InputError, match="white space"):
                list(windows(Text("t", path), engine.tokenizer, length))
            return
        found = list(windows(Text("t", path), engine.tokenizer, length, read.append))
    finally:
        texts_module.PIECE = before
    assert all(len(window) == length for window in found[:-1])
    assert 1 <= len(found[-1]) <= length
    # A cut may make two tokens of one, but never changes the text.
    assert engine.tokenizer.decode([i for window in found for i in window]) == text
    assert sum(read) == path.stat().st_size


def test_short_texts_are_tokenised_whole(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "tales.txt").write_text(TALES, "utf-8")
    found = windows(Text("tales", tmp_path / "tales.txt"), engine.tokenizer, 7)
    assert [i for window in found for i in window] == engine.tokenizer.encode(TALES)


def test_names_of_domains(tmp_path: Path) -> None:
    for name in ("a.txt", "b.tar.xz", "c=d.txt"):
        (tmp_path / name).write_bytes(lzma.compress(b"x") if name.endswith(".xz") else b"x")
    words = [f"{tmp_path}/a.txt", f"{tmp_path}/b.tar.xz", f"other={tmp_path}/a.txt", f"{tmp_path}/c=d.txt"]
    assert [text.domain for text in parse_texts(words)] == ["a", "b", "other", "c=d"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "no text to analyse"),
        (["{}/absent.txt"], "absent.txt cannot be read: No such file"),
        (["{}/empty.txt"], "empty.txt is empty"),
        (["{}"], "is a folder"),
        (["={}/a.txt"], "names no domain"),
        (["{}/a.txt", "a={}/a.txt"], "two texts are called a"),
    ],
)
def test_texts_that_cannot_be_taken(words: list[str], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(InputError, match=sentence):
        parse_texts([word.format(tmp_path) for word in words])


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("a.txt", b" \n\t ", "nothing but white space"),
        ("a.xz", b"plain", "no whole xz"),
        ("a.xz", lzma.compress(b"a fox " * 100)[:40], "no whole xz"),
    ],
)
def test_texts_that_cannot_be_read(name: str, content: bytes, sentence: str, engine: Engine, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=sentence):
        list(windows(Text("a", tmp_path / name), engine.tokenizer, 4))
