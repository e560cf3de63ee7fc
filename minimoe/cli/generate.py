"""`minimoe generate`: continue a text."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minimoe.cli import options
from minimoe.cli.terminal import on, tell, write, write_json
from minimoe.errors import InputError, NumericalError

if TYPE_CHECKING:
    from minimoe.benchmark import Meter
    from minimoe.generation import Generation
    from minimoe.routing import Routing

DEFAULT_PROMPT = "Once upon a time"
LARGEST_PROMPT = 2**24  # bytes; no model's context holds as much, and /dev/zero has no end


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.", show_default=DEFAULT_PROMPT)] = None,
    model: options.Model = options.DEFAULT_MODEL,
    router: options.RouterSpec = options.DEFAULT_ROUTER,
    max_new_tokens: options.MaxNewTokens = 64,
    temperature: options.Temperature = 0.8,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    stop: options.Stop = None,
    prompt_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Read the prompt from a file, or - for stdin; one final newline is dropped."),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Run the same text three more times, and say where the time goes.")
    ] = False,
    routing: Annotated[
        bool, typer.Option("--routing", help="Show how many experts each token used; with --json, which ones.")
    ] = False,
    record: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the routing to a file, for --router replay:file=FILE.")
    ] = None,
    backend: options.Backend = None,
    dtype: options.DType = None,
    device: options.Device = options.DEFAULT_DEVICE,
    threads: options.Threads = None,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Continue a text. The text streams to stdout; everything else goes to stderr."""
    text = _prompt(prompt, prompt_file)
    sampling = options.check_sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    if record is not None:
        options.check_output("--record", record, options.needed(prompt_file, models=[model], specs=[router]))
        options.check_in_spec("--record", record)
        if max_new_tokens == 0:
            raise InputError("--record needs --max-new-tokens of at least 1: without new tokens nothing is run.")
    from minimoe.benchmark import Meter
    from minimoe.sampling import stop_texts

    stop_texts(stop)  # refused before a large model is loaded
    start = time.perf_counter()
    engine = options.load_engine(model, router, backend, dtype, device, threads)
    load_seconds = time.perf_counter() - start
    facts = options.describe(engine)
    for line in (options.headline(facts, router), *engine.notes):
        tell(line)

    meter = Meter()
    start = time.perf_counter()
    stream = engine.stream(
        text,
        max_new_tokens=max_new_tokens,
        stop=stop or (),
        routing=routing or record is not None,
        probe=meter,
        **sampling,
    )
    if not json and sys.stdout.isatty():
        from rich.text import Text

        on(sys.stdout).print(Text(text, "dim"), end="", soft_wrap=True)
    written = False
    try:
        for piece in stream:
            if not json:
                write(piece)
                written = True
    except (NumericalError, KeyboardInterrupt):
        if written:  # what comes next on the terminal must not be glued to the text
            write("\n")
        raise
    if not json:
        write("\n")
    result = stream.result
    assert result is not None
    if record is not None:
        from minimoe.recording import write_recording

        kept = result.routing or []
        run = [*result.prompt_tokens, *result.tokens][: kept[0].num_tokens if kept else 0]
        write_recording(record, run, kept)
    timings = {"load_seconds": load_seconds, **_timings(result, meter, start, time.perf_counter())}
    tell(_summary(result, meter, timings))

    measured = engine.profile(text, max_new_tokens=len(result.tokens), **sampling) if profile else None
    if json:
        document = {
            "prompt": text,
            "prompt_tokens": result.prompt_tokens,
            "text": result.text,
            "tokens": result.tokens,
            "finish_reason": result.finish_reason,
            **facts,
            "router": router,
            "seed": seed,
            "sampling": {**sampling, "max_new_tokens": max_new_tokens, "stop": stop or []},
            "mean_k": meter.mean_k,
            "timings": timings,
            "versions": options.versions(),
        }
        if measured:
            document["profile"] = measured.to_dict()
        if routing:
            document["routing"] = _routing_data(result.routing or [])
        write_json(document)
        return
    from minimoe.cli import pictures

    if measured:
        for table in pictures.profile_tables(measured):
            tell(table)
    if routing:
        run = [*result.prompt_tokens, *result.tokens]
        tell(pictures.expert_counts([engine.tokenizer.decode([i]) for i in run], result.routing or []))


def _prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The prompt, from wherever it comes.

    Raises:
        InputError: two prompts, a file that cannot be read, or one that is not text.
    """
    if prompt_file is None:
        text = DEFAULT_PROMPT if prompt is None else prompt
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InputError("the prompt is not valid UTF-8; give it in a file with --prompt-file.")
        return text
    if prompt is not None:
        raise InputError("give a prompt or a --prompt-file, not both.")
    name = "stdin" if prompt_file == "-" else prompt_file
    try:
        data = _read(prompt_file)
    except OSError as error:
        raise InputError(f"the prompt file {name} cannot be read ({error.strerror}); check its path.") from error
    if len(data) > LARGEST_PROMPT:
        raise InputError(f"the prompt file {name} is larger than {LARGEST_PROMPT >> 20} MiB; shorten it.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"the prompt file {name} is not UTF-8 text (byte {error.start}); convert it first.") from error
    if "\0" in text:
        raise InputError(f"the prompt file {name} holds a zero byte, so it is not text; choose another file.")
    return text.removesuffix("\n").removesuffix("\r")


def _read(prompt_file: str) -> bytes:
    """At most one byte more than the largest prompt."""
    if prompt_file == "-":
        if sys.stdin is None:
            raise InputError("standard input is closed, so there is no prompt to read.")
        return sys.stdin.buffer.read(LARGEST_PROMPT + 1)
    with Path(prompt_file).open("rb") as file:
        return file.read(LARGEST_PROMPT + 1)


def _timings(result: Generation, meter: Meter, start: float, end: float) -> dict[str, float | None]:
    """Seconds and tokens per second: of the prompt up to the first new token, and of each token after that."""
    switch = meter.began.get("decode", end)
    decoded = max(len(result.tokens) - 1, 0)
    return {
        "prefill_seconds": switch - start,
        "decode_seconds": end - switch,
        "prompt_tokens_per_second": len(result.prompt_tokens) / (switch - start) if result.tokens else None,
        "new_tokens_per_second": decoded / (end - switch) if decoded else None,
    }


def _summary(result: Generation, meter: Meter, timings: dict[str, float | None]) -> str:
    def speed(name: str) -> str:
        value = timings[name]
        return "" if value is None else f" at {value:.1f} tokens/s"

    mean_k = "" if meter.mean_k is None else f"mean k {meter.mean_k:.2f}, "
    reasons = {"eos": "the model ended the text", "stop": "a stop text came", "length": "the length was reached"}
    return (
        f"prompt: {len(result.prompt_tokens)} tokens{speed('prompt_tokens_per_second')}, "
        f"new: {len(result.tokens)} tokens{speed('new_tokens_per_second')}, "
        f"{mean_k}{reasons[result.finish_reason]}"
    )


def _routing_data(layers: list[Routing]) -> list[dict[str, Any]]:
    """Per layer, for every token that was run: k, and the experts and weights of its live slots."""
    data = []
    for layer in layers:
        k = layer.k_T.tolist()
        data.append(
            {
                "k": k,
                "experts": [row[:n] for row, n in zip(layer.experts_TK.tolist(), k, strict=True)],
                "weights": [row[:n] for row, n in zip(layer.weights_TK.tolist(), k, strict=True)],
            }
        )
    return data
