"""`minimoe generate`: the text, and what is told beside it."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import Cli, assert_one_sentence
from safetensors.torch import load_file

import minimoe
import minimoe.engine
from minimoe.cli import pictures

TINY = Path(__file__).parent.parent / "weights" / "tiny"


# generate.


def test_generate_writes_the_text_and_nothing_else_to_stdout(cli: Cli, folder: Path) -> None:
    wanted = minimoe.load(folder, router="elbow").generate("The fox", max_new_tokens=20, seed=3, temperature=0.9)
    run = cli("generate", "The fox", "-m", folder, "-r", "elbow", "-n", 20, "--seed", 3, "--temperature", 0.9)
    assert (run.code, run.out) == (0, wanted.text + "\n")
    assert "router elbow" in run.err
    assert f"new: {len(wanted.tokens)} tokens" in run.err


class Flushes(io.StringIO):
    """A stdout that remembers what had been written whenever it was flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def flush(self) -> None:
        self.seen.append(self.getvalue())


def test_generate_streams(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = minimoe.load(folder).generate("Once upon a time", max_new_tokens=12, temperature=0).text
    out = Flushes()
    monkeypatch.setattr(sys, "stdout", out)
    cli("generate", "-m", folder, "-n", 12, "--temperature", 0)
    assert out.seen[-1] == whole + "\n"
    assert len(set(out.seen)) > 4
    assert all(whole.startswith(seen) for seen in out.seen[:-2])


def test_the_prompt_is_shown_on_a_terminal_only(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("generate", "The [b]fox[/b]", "-m", folder, "-n", 4, "--temperature", 0)
    piped = cli(*words)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = cli(*words)
    assert "\x1b" in shown.out
    assert re.sub("\x1b\\[[0-9;]*m", "", shown.out) == "The [b]fox[/b]" + piped.out
    assert "\x1b" not in piped.out + piped.err + shown.err


def test_generate_json(cli: Cli, folder: Path) -> None:
    words = ("-n", 9, "--seed", 5, "--top-k", 40, "--top-p", 0.9, "--min-p", 0.01, "--repetition-penalty", 1.1)
    run = cli("generate", "The owl", "-m", folder, "-r", "elbow", *words, "--stop", "zzz", "--stop", "qqq", "--json")
    options = {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}
    wanted = minimoe.load(folder, router="elbow").generate("The owl", max_new_tokens=9, seed=5, **options)
    document = run.document
    assert document["text"] == wanted.text
    assert document["tokens"] == wanted.tokens
    assert document["prompt_tokens"] == wanted.prompt_tokens
    assert document["finish_reason"] == wanted.finish_reason
    assert document["mean_k"] == pytest.approx(
        torch.cat([layer.k_T for layer in wanted.routing]).double().mean().item()
    )
    assert (document["prompt"], document["model"], document["router"]) == ("The owl", str(folder), "elbow")
    assert (document["dtype"], document["backend"], document["seed"]) == ("float32", minimoe.load(folder).backend, 5)
    assert document["sampling"] == {
        **options,
        "temperature": 0.8,
        "seed": 5,
        "max_new_tokens": 9,
        "stop": ["zzz", "qqq"],
    }
    assert document["versions"]["torch"] == torch.__version__
    weights = load_file(folder / "model.safetensors").values()
    assert document["parameters"] == sum(weight.numel() for weight in weights)
    timings = document["timings"]
    assert timings["new_tokens_per_second"] == pytest.approx((len(wanted.tokens) - 1) / timings["decode_seconds"])
    assert timings["prompt_tokens_per_second"] == pytest.approx(len(wanted.prompt_tokens) / timings["prefill_seconds"])
    assert "routing" not in document
    assert "profile" not in document


@pytest.mark.parametrize("new_tokens", [0, 1])
def test_hardly_any_tokens(cli: Cli, folder: Path, new_tokens: int) -> None:
    words = ("generate", "-m", folder, "-n", new_tokens, "--profile", "--routing")
    document = cli(*words, "--json").document
    assert len(document["tokens"]) == new_tokens
    assert document["timings"]["new_tokens_per_second"] is None
    assert (document["mean_k"] is None) == (new_tokens == 0)
    assert cli(*words).code == 0


def test_generate_stops_at_a_text(cli: Cli, folder: Path) -> None:
    words = ("generate", "-m", folder, "-n", 30, "--temperature", 0)
    whole = cli(*words).out
    stop = whole[8:10]
    run = cli(*words, "--stop", stop)
    assert run.out == whole[: whole.index(stop)] + "\n"
    assert "a stop text came" in run.err


def test_an_empty_stop_text_is_refused_before_a_model_is_loaded(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minimoe.engine, "load", None)
    run = cli("generate", "--stop", "")
    assert_one_sentence(run)
    assert "not empty" in run.err


def test_more_tokens_than_the_context_holds(cli: Cli, checkpoint: Callable[..., Path]) -> None:
    document = cli("generate", "-m", checkpoint("base"), "-n", 10**30, "--seed", 1, "--json").document
    assert document["finish_reason"] in ("length", "eos")
    assert len(document["prompt_tokens"]) + len(document["tokens"]) <= 128


def test_routing_in_json_is_that_of_the_engine(cli: Cli, folder: Path) -> None:
    words = ("generate", "-m", folder, "-r", "top_p:p=0.7", "-n", 5, "--temperature", 0)
    layers = cli(*words, "--json", "--routing").document["routing"]
    engine = minimoe.load(folder, router="top_p:p=0.7")
    wanted = engine.generate("Once upon a time", max_new_tokens=5, temperature=0).routing
    assert len(layers) == len(wanted) == engine.config.num_layers
    for layer, routing in zip(layers, wanted, strict=True):
        assert layer["k"] == routing.k_T.tolist()
        for token, k in enumerate(layer["k"]):
            assert layer["experts"][token] == routing.experts_TK[token, :k].tolist()
            assert layer["weights"][token] == routing.weights_TK[token, :k].tolist()


def test_routing_as_a_picture(cli: Cli, folder: Path) -> None:
    words = ("generate", "-m", folder, "-r", "top_p:p=0.7,cap=64", "-n", 5, "--temperature", 0)
    layers = cli(*words, "--json", "--routing").document["routing"]
    run = cli(*words, "--routing")
    assert run.out == cli(*words).out
    rows = [line.rsplit(maxsplit=2) for line in run.err.splitlines() if re.search(r"  \S{3}  \d+\.\d\d$", line)]
    by_token = list(zip(*(layer["k"] for layer in layers), strict=True))
    assert [row[-2] for row in rows] == ["".join(pictures.DIGITS[k] for k in token) for token in by_token]
    assert [row[-1] for row in rows] == [f"{sum(token) / len(token):.2f}" for token in by_token]


def test_profile(cli: Cli, folder: Path) -> None:
    words = ("generate", "-m", folder, "-n", 4, "--seed", 2, "--profile")
    document = cli(*words, "--json").document
    profile = document["profile"]
    assert profile["text"] == document["text"]
    assert profile["new_tokens"] == len(document["tokens"])
    assert [phase["phase"] for phase in profile["phases"]] == ["prefill", "decode"]
    run = cli(*words)
    assert run.out == document["text"] + "\n"
    assert all(name in run.err for name in ("attention", "experts", "median", "share", "FLOPs", "end to end"))
    assert "…" not in run.err


@pytest.mark.parametrize(
    ("data", "prompt"),
    [
        (b"The fox", "The fox"),
        (b"The fox\n", "The fox"),
        (b"The fox\r\n", "The fox"),
        (b"The fox\n\n", "The fox\n"),
        (b"\xef\xbb\xbfThe fox", "The fox"),
        ("a🙂é한".encode(), "a🙂é한"),
        (b"", ""),
    ],
)
def test_prompt_from_a_file_and_from_stdin(cli: Cli, folder: Path, tmp_path: Path, data: bytes, prompt: str) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(data)
    words = ("generate", "-m", folder, "-n", 1, "--json", "--prompt-file")
    assert cli(*words, file).document["prompt"] == prompt
    assert cli(*words, "-", stdin=data).document["prompt"] == prompt


def test_no_prompt_is_the_default_prompt(cli: Cli, folder: Path) -> None:
    assert cli("generate", "-m", folder, "-n", 1, "--json").document["prompt"] == "Once upon a time"
    assert cli("generate", "", "-m", folder, "-n", 1, "--json").document["prompt"] == ""


def test_backend_dtype_and_threads_reach_the_engine(cli: Cli, folder: Path) -> None:
    words = ("--backend", "reference", "--dtype", "bfloat16", "--device", "cpu", "--threads", 1)
    document = cli("generate", "-m", folder, "-n", 1, "--json", *words).document
    chosen = [document[key] for key in ("backend", "dtype", "device", "threads")]
    assert chosen == ["reference", "bfloat16", "cpu", 1]


@pytest.mark.skipif(not (TINY / "model.safetensors").exists(), reason="the embedded model is not there")
@pytest.mark.parametrize("router", ["top_k", "elbow"])
def test_the_embedded_model_needs_no_argument(cli: Cli, router: str) -> None:
    run = cli("generate", "--router", router)
    assert run.code == 0
    assert len(run.out.split()) > 10


def test_a_prompt_that_is_not_utf8(cli: Cli, folder: Path) -> None:
    run = cli("generate", os.fsdecode(b"caf\xe9"), "-m", folder)
    assert_one_sentence(run)
    assert "UTF-8" in run.err
    assert_one_sentence(cli("generate", "-m", folder, "--prompt-file", "-", stdin=b"caf\xe9"))


def test_nothing_run_is_nothing_to_record(cli: Cli, folder: Path, tmp_path: Path) -> None:
    run = cli("generate", "The owl", "-m", folder, "-n", 0, "--record", tmp_path / "r.npz")
    assert (run.code, run.out) == (2, "")
    assert not list(tmp_path.iterdir())


def test_an_absurd_number_of_kept_experts_is_all_of_them(cli: Cli, folder: Path) -> None:
    words = ("generate", "The owl", "-m", folder, "-n", 2, "--temperature", 0)
    many = cli(*words, "--router", f"random_tail:keep={10**30}")
    assert many.code == 0
    assert many.out == cli(*words).out
