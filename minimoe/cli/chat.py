"""`minimoe chat`: a conversation, one line a turn."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from minimoe.cli import options
from minimoe.cli.terminal import tell, write, write_json
from minimoe.errors import InputError

if TYPE_CHECKING:
    from minimoe.chat import Chat

EXIT, RESET = "/exit", "/reset"
LONGEST_LINE = 2**20  # bytes


def chat(
    model: options.Model = options.DEFAULT_MODEL,
    router: options.RouterSpec = options.DEFAULT_ROUTER,
    max_new_tokens: options.MaxNewTokens = 256,
    temperature: options.Temperature = 0.8,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    stop: options.Stop = None,
    backend: options.Backend = None,
    dtype: options.DType = None,
    device: options.Device = options.DEFAULT_DEVICE,
    threads: options.Threads = None,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Talk with a model that has a chat template. Each line of stdin is a turn; answers stream to stdout.

    /reset starts over, /exit or the end of the input ends the conversation.
    """
    sampling = options.check_sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    engine = options.load_engine(model, router, backend, dtype, device, threads)
    facts = options.describe(engine)
    settings = {**sampling, "max_new_tokens": max_new_tokens, "stop": stop or []}
    talk = engine.chat(**settings)
    for line in (options.headline(facts, router), *engine.notes):
        tell(line)

    turns: list[dict[str, Any]] = []
    conversation = 0
    try:
        for line in _lines():
            if line == RESET:
                talk = engine.chat(**settings)
                conversation += 1
            else:
                turns.append({"conversation": conversation, "user": line, **_turn(talk, line, streaming=not json)})
    finally:  # whatever ends the conversation, what was said is not lost
        if json:
            write_json(
                {
                    **facts,
                    "router": router,
                    "seed": seed,
                    "sampling": settings,
                    "turns": turns,
                    "versions": options.versions(),
                }
            )
    if any("error" in turn for turn in turns):
        raise typer.Exit(2)


def _lines() -> Iterator[str]:
    """What the user says, turn by turn; blank lines say nothing.

    Raises:
        InputError: no stdin, or a line that is not UTF-8.
    """
    if sys.stdin is None:
        raise InputError("standard input is closed, so there is nobody to chat with.")
    while True:
        sys.stderr.write("> ")
        sys.stderr.flush()
        data = sys.stdin.buffer.readline(LONGEST_LINE + 1)
        if len(data) > LONGEST_LINE:
            raise InputError(f"a line of more than {LONGEST_LINE >> 10} KiB is too long for any model; shorten it.")
        try:
            line = data.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise InputError(f"this line is not UTF-8 text (byte {error.start}); set the terminal to UTF-8.") from error
        if not data or line == EXIT:
            sys.stderr.write("\n")
            return
        if line:
            yield line


def _turn(talk: Chat, line: str, *, streaming: bool) -> dict[str, Any]:
    """One answer. What cannot be answered is said, and the conversation stays as it was."""
    start = time.perf_counter()
    try:
        for piece in talk.say(line):
            if streaming:
                write(piece)
    except InputError as error:
        tell(f"error: {error} Type {RESET} to start over.", style="red")
        return {"error": str(error)}
    if streaming:
        write("\n")
    assert talk.result is not None
    return {
        "assistant": talk.result.text,
        "tokens": talk.result.tokens,
        "finish_reason": talk.result.finish_reason,
        "seconds": time.perf_counter() - start,
    }
