"""`minimoe chat`: one answer a line."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import Cli

import minimoe
import minimoe.engine

# chat.


def test_chat_answers_line_by_line(cli: Cli, chatty: Path) -> None:
    lines = ["Who are you?", "Where is the fox?"]
    run = cli("chat", "-m", chatty, "-n", 8, "--seed", 4, stdin="\n".join(["", *lines, ""]).encode())
    talk = minimoe.load(chatty).chat(max_new_tokens=8, seed=4)
    answers = ["".join(talk.say(line)) for line in lines]
    assert run.code == 0
    assert run.out == "".join(answer + "\n" for answer in answers)
    assert run.err.count("> ") == 4  # a blank line, two turns and the end of the input


def test_chat_reset_and_exit(cli: Cli, chatty: Path) -> None:
    line = "z" * 60  # one such turn fits into the context, two do not
    stdin = "\n".join([line, line, "/reset", line, "/exit", "never read"]).encode()
    turns = cli("chat", "-m", chatty, "-n", 4, "--json", stdin=stdin).document["turns"]
    assert ["error" in turn for turn in turns] == [False, True, False]
    assert turns[0]["assistant"] == turns[2]["assistant"]
    assert [turn["conversation"] for turn in turns] == [0, 0, 1]


def test_chat_json(cli: Cli, chatty: Path) -> None:
    run = cli("chat", "-m", chatty, "-n", 6, "--json", stdin=b"Hello\n/reset\nHello\n")
    document = run.document
    wanted = minimoe.load(chatty).chat(max_new_tokens=6)
    text = "".join(wanted.say("Hello"))
    assert [turn["conversation"] for turn in document["turns"]] == [0, 1]
    for turn in document["turns"]:
        assert turn["user"] == "Hello"
        assert turn["assistant"] == text
        assert turn["tokens"] == wanted.result.tokens
        assert turn["finish_reason"] == wanted.result.finish_reason
    assert document["sampling"]["max_new_tokens"] == 6


def test_chat_goes_on_after_its_context_is_full(cli: Cli, chatty: Path) -> None:
    words = ("chat", "-m", chatty, "-n", 4, "--json")
    run = cli(*words, stdin=f"Hello\n{'fox ' * 100}\n/reset\nHello\n".encode())
    first, full, again = run.document["turns"]
    assert "128" in full["error"]
    assert "128" in run.err
    assert "/reset" in run.err
    assert first["assistant"] == again["assistant"]
    assert run.code == 2


def test_chat_line_that_is_not_utf8(cli: Cli, chatty: Path) -> None:
    run = cli("chat", "-m", chatty, stdin=b"caf\xe9\n")
    assert run.code == 2
    assert "UTF-8" in run.err
    assert "Traceback" not in run.err


def test_a_chat_that_breaks_off_keeps_its_turns(cli: Cli, chatty: Path) -> None:
    run = cli("chat", "-m", chatty, "-n", "3", "--json", stdin=b"Hello\n\xff\xfe\n")
    assert run.code == 2
    assert [turn["user"] for turn in json.loads(run.out)["turns"]] == ["Hello"]
    run = cli("chat", "-m", chatty, "-n", "3", stdin=b"x" * (2**20 + 1))
    assert run.code == 2
    assert "too long" in run.err
