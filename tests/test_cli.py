"""The command line: what goes to stdout and what does not, exit codes, and one sentence for every bad input."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import edit_json
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import minimoe
import minimoe.engine
from minimoe.cli import main, pictures
from minimoe.cli.bench import split_specs, whole_numbers
from minimoe.cli.options import DEFAULT_DEVICE, DEFAULT_MODEL, DEFAULT_ROUTER, count
from minimoe.engine import DTYPES
from minimoe.errors import InputError
from minimoe.experts import BACKENDS
from minimoe.routers import ROUTERS, PrefixRouter
from minimoe.routers.spec import parameters
from minimoe.routing import Routing

VERBS = ("generate", "chat", "routers", "bench", "download")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
TINY = Path(__file__).parent.parent / "weights" / "tiny"


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document; anything else on stdout fails here."""
        assert self.out.count("\n") == 1
        return json.loads(self.out)


Cli = Callable[..., Run]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs the command line in this process, with bytes on its stdin."""

    def run(*words: str, stdin: bytes = b"") -> Run:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return Run(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("top8_of_64")


@pytest.fixture(scope="module")
def chatty(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template and a context of 128 tokens."""
    folder = tmp_path_factory.mktemp("chatty") / "model"
    shutil.copytree(checkpoint("base"), folder)
    edit_json(folder / "tokenizer_config.json", {"chat_template": TEMPLATE})
    return folder


def process(words: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """The command line in a process of its own, with stdout buffered as it is by default."""
    command = [sys.executable, "-m", "minimoe", *words]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, env=environment, **streams)


# Help.


@pytest.mark.parametrize("words", [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)])
def test_help_needs_no_torch(words: list[str]) -> None:
    # Seconds of the processor and not of the clock, as other work may run on this machine.
    script = (
        "import sys, time\n"
        "from minimoe.cli import main\n"
        f"code = main({words})\n"
        "print(code, 'torch' in sys.modules, time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    code, has_torch, seconds = done.stdout.splitlines()[-1].split()
    assert (code, has_torch, done.stderr) == ("0", "False", "")
    assert float(seconds) < 1


def test_help_names_what_can_be_chosen(cli: Cli) -> None:
    assert cli("--help").out.startswith("Usage: minimoe")
    assert all(verb in cli("--help").out for verb in VERBS)
    text = " ".join(cli("generate", "--help").out.split())
    assert all(name in text for name in [*BACKENDS, *DTYPES])


def test_no_verb_shows_the_help(cli: Cli) -> None:
    run = cli()
    assert run.code == 2
    assert "generate" in run.out + run.err


def test_version(cli: Cli) -> None:
    assert cli("--version") == Run(0, f"minimoe {minimoe.__version__}\n", "")


def test_defaults_are_those_of_load() -> None:
    import inspect

    of_load = {name: parameter.default for name, parameter in inspect.signature(minimoe.engine.load).parameters.items()}
    assert of_load["model"] == DEFAULT_MODEL
    assert of_load["router"] == DEFAULT_ROUTER
    assert of_load["backend"] is None
    assert of_load["device"] == DEFAULT_DEVICE


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
    threads = torch.get_num_threads()
    words = ("--backend", "reference", "--dtype", "bfloat16", "--device", "cpu", "--threads", 1)
    try:
        document = cli("generate", "-m", folder, "-n", 1, "--json", *words).document
    finally:
        torch.set_num_threads(threads)
    chosen = [document[key] for key in ("backend", "dtype", "device", "threads")]
    assert chosen == ["reference", "bfloat16", "cpu", 1]


def test_notes_of_the_engine_are_told(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minimoe.engine.has_native_half", lambda dtype: False)
    for verb in (("generate", "-n", 1), ("bench", "-p", 2, "-n", 0, "-r", 1)):
        run = cli(*verb, "-m", folder, "--dtype", "float16")
        assert run.err.count("no instructions for float16") == 1


@pytest.mark.skipif(not (TINY / "model.safetensors").exists(), reason="the embedded model is not there")
@pytest.mark.parametrize("router", ["top_k", "elbow"])
def test_the_embedded_model_needs_no_argument(cli: Cli, router: str) -> None:
    run = cli("generate", "--router", router)
    assert run.code == 0
    assert len(run.out.split()) > 10


# Bad input.

BAD_INPUTS = [
    ("generate --model {model} --temperature nan", "temperature"),
    ("generate --model {model} --temperature inf", "temperature"),
    ("generate --model {model} --temperature 1e400", "temperature"),
    ("generate --model {model} --temperature -1", "temperature"),
    ("generate --model {model} --temperature hot", "must be a number"),
    ("generate --model {model} -n many", "must be a whole number"),
    ("bench --model {model} --routers ,", "at least one rule"),
    ("generate --model {model} --top-k -1", "top-k"),
    ("generate --model {model} --top-p 1.1", "top-p"),
    ("generate --model {model} --top-p nan", "top-p"),
    ("generate --model {model} --min-p -0.1", "min-p"),
    ("generate --model {model} --repetition-penalty 0", "penalty"),
    ("generate --model {model} --repetition-penalty nan", "penalty"),
    ("generate --model {model} --seed 9223372036854775808", "seed"),
    ("generate --model {model} --seed 1e400", "--seed"),
    ("generate --model {model} --stop=", "stop"),
    ("generate --model {model} -n -1", "--max-new-tokens"),
    ("generate --model {model} -n 1e400", "--max-new-tokens"),
    ("generate --model {model} -n nan", "--max-new-tokens"),
    ("generate --model {model} --threads 0", "must be at least 1"),
    ("generate --model {model} --threads 999999999999", "--threads"),
    ("generate --model {model} --device gpu", "gpu"),
    ("generate --model {model} --device cuda:4096", "cuda:4096"),
    ("generate --model {model} --dtype int8", "int8"),
    ("generate --model {model} --backend warp", "warp"),
    ("generate --model {model} --router elbwo", "elbow"),
    ("generate --model {model} --router elbow:cup=3", "cap"),
    ("generate --model {model} --router elbow:cap=65", "65"),
    ("generate --model {model} --router ./nowhere.py:Rule", "nowhere.py"),
    ("generate --model nowhere", "nowhere"),
    ("generate --model ./nowhere", "nowhere"),
    ("generate --model=", "not a model"),
    ("generate --model {model} --prompt-file ./nowhere.txt", "nowhere.txt"),
    ("generate --model {model} --prompt-file {model}", "cannot be read"),
    ("generate --model {model} --prompt-file {model}/model.safetensors", "not UTF-8"),
    ("generate --model {model} --prompt-file {zeros}", "zero byte"),
    ("generate --model {model} --prompt-file /dev/zero", "larger than"),
    ("generate --model {model} --prompt-file {locked}", "locked"),
    ("generate hello --model {model} --prompt-file -", "not both"),
    ("generate hello again", "again"),
    ("generate {long} --model {model}", "128"),
    ("generate --frobnicate", "--frobnicate"),
    ("generate --model", "--model"),
    ("genrate", "generate"),
    ("chat --model {model}", "template"),
    ("chat --model {chatty} --temperature -1", "temperature"),
    ("routers elbwo", "elbow"),
    ("routers elbow:cap=65", "65"),
    ("download nowhere", "nowhere"),
    ("download ./nowhere", "nowhere"),
    ("download", "MODEL"),
    ("bench --model {model} -p 129", "129"),
    ("bench --model {model} -p 0 -n 113", "129"),
    ("bench --model {model} -p 0 -n 0", "nothing to measure"),
    ("bench --model {model} -p 1,x", "'x'"),
    ("bench --model {model} -p 1.5", "1.5"),
    ("bench --model {model} -n -1", "-1"),
    ("bench --model {model} -b 0", "--batch"),
    ("bench --model {model} -b 99999999999999999999", "--batch"),
    ("bench --model {model} -r 0", "--repetitions"),
    ("bench --model {model} -o xml", "xml"),
    ("bench --model {model} -p 4 -n 0 --backends bucketed,warp", "warp"),
    ("bench --model {model} -p 4 -n 0 --routers top_k,elbwo", "elbow"),
    ("bench --model {model} --seed 9223372036854775808", "seed"),
]


def assert_one_sentence(run: Run, code: int = 2) -> None:
    assert run.code == code
    assert run.out == ""
    assert "Traceback" not in run.err
    (sentence,) = [line for line in run.err.splitlines() if line.startswith("error: ")]
    assert run.err.splitlines()[-1] == sentence
    assert sentence.endswith((".", "?"))


@pytest.mark.parametrize(("line", "named"), BAD_INPUTS, ids=[line for line, _ in BAD_INPUTS])
def test_bad_input_is_one_sentence(
    cli: Cli, folder: Path, chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, named: str
) -> None:
    (tmp_path / "zeros").write_bytes(bytes(100))
    (tmp_path / "locked").write_text("text")
    opened = Path.open

    def refuse(path: Path, *rest: Any, **options: Any) -> Any:
        if path.name == "locked":  # the superuser may read everything, so the refusal is played
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *rest, **options)

    monkeypatch.setattr(Path, "open", refuse)
    places = {
        "{model}": str(folder),
        "{chatty}": str(chatty),
        "{zeros}": str(tmp_path / "zeros"),
        "{locked}": str(tmp_path / "locked"),
        "{long}": "fox-" * 200,
    }
    for name, place in places.items():
        line = line.replace(name, place)
    run = cli(*line.split(), stdin=b"hello\n")
    assert_one_sentence(run)
    assert named.lower() in run.err.lower()


def test_a_prompt_that_is_not_utf8(cli: Cli, folder: Path) -> None:
    run = cli("generate", os.fsdecode(b"caf\xe9"), "-m", folder)
    assert_one_sentence(run)
    assert "UTF-8" in run.err
    assert_one_sentence(cli("generate", "-m", folder, "--prompt-file", "-", stdin=b"caf\xe9"))


# A user's own rules.

HEAD = "import torch\nfrom minimoe.routers import Router, TopK\nfrom minimoe.routing import Routing\n"
OWN_RULES = {
    "raises at import": ("1 / 0\nclass Mine(TopK): pass", "ZeroDivisionError"),
    "exits at import": ("import sys; sys.exit(3)", "SystemExit"),
    "does not parse": ("class Mine(TopK) pass", "SyntaxError"),
    "raises when built": (
        "class Mine(Router):\n def __init__(self): raise KeyError('lost')\n route = None",
        "KeyError",
    ),
    "raises in route": ("class Mine(TopK):\n def route(self, x, context):\n  return 1 / 0", "line 6 of"),
    "exits in route": ("class Mine(TopK):\n def route(self, x, context): raise SystemExit(3)", "SystemExit"),
    "raises in count": ("class Mine(TopK):\n def count(self, p, context): return p.nonsense", "AttributeError"),
    "returns nothing": ("class Mine(TopK):\n def route(self, x, context): pass", "NoneType"),
    "routes too few tokens": (
        "class Mine(TopK):\n def route(self, x, context): return super().route(x, context).rows(slice(0, 1))",
        "was given logits",
    ),
    "names an expert that is not there": (
        "class Mine(TopK):\n"
        " def route(self, x, context):\n"
        "  r = super().route(x, context)\n"
        "  return Routing(r.experts_TK + 64, r.weights_TK, r.k_T, 64)",
        "broken Routing",
    ),
}


@pytest.mark.parametrize(("code", "named"), OWN_RULES.values(), ids=OWN_RULES)
def test_a_rule_that_fails_is_named_with_its_error(
    cli: Cli, folder: Path, tmp_path: Path, code: str, named: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + code)
    for verb in (("generate", "-n", 2), ("bench", "-p", 4, "-n", 0)):
        run = cli(*verb, "-m", folder, "--json", "--router", f"{file}:Mine")
        assert_one_sentence(run)
        assert str(file) in run.err
        assert named in run.err


def test_how_often_an_own_rule_is_tested(
    cli: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + "class Mine(TopK): pass")
    tested: list[Routing] = []
    monkeypatch.setattr(Routing, "check", lambda routing: tested.append(routing))
    layers, own = 3, ("-m", folder, "--router", f"{file}:Mine")
    cli("generate", "-n", 5, *own)
    assert len(tested) == layers * 5
    tested.clear()
    cli("bench", "-p", 4, "-n", 4, "-r", 2, *own)
    assert len(tested) == layers * 2


def test_a_rule_that_works(cli: Cli, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + "class Mine(TopK):\n def limit(self, context): return 3")
    own = ("-m", folder, "-r", f"{file}:Mine")
    assert cli("generate", *own, "-n", 4, "--json").document["mean_k"] == 3
    words = ("-p", 4, "-n", 0, "-r", 1, "-o", "json", "--router", f"{file}:Mine")
    (row,) = cli("bench", "-m", folder, *words).document["rows"]
    assert (row["mean_k"], row["router"]) == (3, f"{file}:Mine")
    assert cli("routers", f"{file}:Mine", "--json").document["examples"][0]["k"] == 3


# Failures that are nobody's bad input.


def test_broken_weights_are_a_failure(cli: Cli, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(checkpoint("base"), broken)
    weights = load_file(broken / "model.safetensors")
    weights["lm_head.weight"][0, 0] = float("nan")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    run = cli("generate", "-m", broken, "--json")
    assert_one_sentence(run, code=1)
    assert "not finite" in run.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), 1),
        (torch.OutOfMemoryError("CUDA out of memory"), 1),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 1),
        (OSError(12, "Cannot allocate memory"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes_of_failures(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("minimoe.engine.load", fail)
    run = cli("generate", "-m", folder)
    if code == 130:
        assert run == Run(130, "", "")
    else:
        assert_one_sentence(run, code)


def test_a_bug_is_not_hidden(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("minimoe.engine.load", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli("generate", "-m", folder)


def test_a_reader_that_goes_away_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    running = process(["--help"], stdout=write)
    os.close(write)
    _, err = running.communicate()
    assert (running.returncode, err) == (1, b"")


def test_output_that_cannot_be_written() -> None:
    with open("/dev/full", "wb") as full:
        running = process(["--help"], stdout=full)
        _, err = running.communicate()
    assert running.returncode == 1
    assert err.decode().splitlines() == ["error: reading or writing failed: No space left on device."]


@pytest.mark.parametrize(("closed", "code"), [(">&-", 2), ("2>&-", 0), (">&- 2>&-", 2)])
def test_closed_streams(closed: str, code: int) -> None:
    command = f'exec "{sys.executable}" -m minimoe --version {closed}'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert ("standard output is closed" in done.stderr) == (closed == ">&-")


@pytest.mark.parametrize("words", [["chat", "-m"], ["generate", "--prompt-file", "-", "-m"]])
def test_closed_stdin(cli: Cli, chatty: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], capsys: Any) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    code = main([*words, str(chatty)])
    captured = capsys.readouterr()
    assert_one_sentence(Run(code, captured.out, captured.err))
    assert "standard input is closed" in captured.err


def test_interrupt_is_quiet() -> None:
    running = process(["generate", "--prompt-file", "-"], stdin=subprocess.PIPE)
    stat = Path(f"/proc/{running.pid}/wchan")
    for _ in range(200):  # until it waits for its prompt
        time.sleep(0.05)
        if "pipe" in stat.read_text():
            break
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (130, b"", b"")


def test_text_that_the_terminal_cannot_show(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", plain)
    assert cli("generate", "-m", folder, "-n", 30).code == 0
    assert len(plain.buffer.getvalue()) > 0  # type: ignore[attr-defined]


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


# routers and download.


def test_routers_lists_every_rule_with_its_keys(cli: Cli) -> None:
    rules = cli("routers", "--json").document["routers"]
    assert [rule["name"] for rule in rules] == list(ROUTERS)
    text = cli("routers").out
    for rule in rules:
        known = parameters(ROUTERS[rule["name"]])
        defaults = {k: None if p.default is p.empty else p.default for k, p in known.items()}
        assert {key["name"]: key["default"] for key in rule["keys"]} == defaults
        assert rule["summary"].endswith(".")
        assert rule["formula"].startswith("k = ")
        assert rule["source"]
        assert all(key["help"] for key in rule["keys"])
        assert rule["name"] in text
        assert rule["summary"] in text
        assert rule["formula"] in text
        assert rule["sees"] == ROUTERS[rule["name"]].sees
        assert rule["needs"] == ROUTERS[rule["name"]].needs
    assert "p=0.5" in text


PREFIX = [name for name, rule in ROUTERS.items() if issubclass(rule, PrefixRouter)]


@pytest.mark.parametrize("spec", [*PREFIX, "elbow:cap=64", "top_p:p=0.9,cap=64", "top_k:k=64", "min-p"])
def test_one_rule_is_drawn_with_what_it_keeps(cli: Cli, spec: str) -> None:
    examples = cli("routers", spec, "--json").document["examples"]
    run = cli("routers", spec)
    assert (run.code, run.err) == (0, "")
    drawn = [line.strip() for line in run.out.splitlines() if re.search(r"-\| k = ", line)]
    bases = [line[6:] for line in run.out.splitlines() if re.fullmatch(r" {6}#[#.]{63}", line)]
    assert len(drawn) == len(bases) == len(examples) == 2
    for example, cut, base in zip(examples, drawn, bases, strict=True):
        k = example["k"]
        assert example["probabilities"] == sorted(example["probabilities"], reverse=True)
        assert sum(example["probabilities"]) == pytest.approx(1)
        assert example["kept"] == list(range(k))
        assert example["mass"] == pytest.approx(sum(example["probabilities"][:k]))
        assert base == "#" * k + "." * (64 - k)
        assert cut == "-" * k + f"| k = {k} of 64"


def test_routers_md_is_what_the_rules_say_of_themselves(cli: Cli) -> None:
    written = (Path(minimoe.__file__).parents[1] / "ROUTERS.md").read_text("utf-8")
    assert cli("routers", "--markdown").out == written, "run: python -m minimoe routers --markdown > ROUTERS.md"
    assert [line.removeprefix("## ") for line in written.splitlines() if line.startswith("## ")] == list(ROUTERS)
    assert cli("routers", "elbow", "--markdown").code == 2


@pytest.mark.parametrize("name", [name for name in ROUTERS if name not in PREFIX])
def test_a_rule_that_keeps_no_prefix_is_drawn_too(cli: Cli, name: str) -> None:
    run, document = cli("routers", name), cli("routers", name, "--json").document
    assert run.code == 0
    assert len(document["examples"]) == (0 if name == "replay" else 2)
    bases = [line[6:] for line in run.out.splitlines() if re.fullmatch(r" {6}[#.]{64}", line)]
    for example in document["examples"]:
        assert len(example["kept"]) == example["k"]
        assert example["mass"] == pytest.approx(sum(example["probabilities"][i] for i in example["kept"]))
    if name != "replay":
        assert [i for i, mark in enumerate(bases[-1]) if mark == "#"] == document["examples"][-1]["kept"]


def test_the_examples_show_the_rules_apart(cli: Cli) -> None:
    def k(spec: str) -> list[int]:
        return [example["k"] for example in cli("routers", spec, "--json").document["examples"]]

    assert k("top_k") == [8, 8]
    doubt, sure = k("elbow:cap=64")
    assert sure < 8 < doubt
    assert k("elbow") == [8, sure]


def test_bars_are_as_high_as_their_probability() -> None:
    rows = pictures.curve([0.5, 0.25, 0.2, 0.05], kept=[0, 1]).plain.splitlines()
    columns = ["".join(row[6 + rank : 7 + rank] for row in rows[:-1]).strip() for rank in range(4)]
    assert columns == ["#" * 10, "#" * 5, "." * 4, "."]
    assert rows[0].startswith("0.500 ")
    assert rows[-1] == "      --| k = 2 of 4"


def test_download_prints_the_folder(cli: Cli, folder: Path) -> None:
    assert cli("download", folder) == Run(0, f"{folder}\n", "")


def test_download_passes_its_revision_on(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("minimoe.hub.resolve", lambda model, revision: asked.append((model, revision)) or folder)
    assert cli("download", "owner/name", "--revision", "v2").out == f"{folder}\n"
    assert asked == [("owner/name", "v2")]


def test_download_checks_that_the_model_is_complete(cli: Cli, folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    run = cli("download", tmp_path)
    assert_one_sentence(run)
    assert "model.safetensors" in run.err


# bench.


def test_bench_json(cli: Cli, folder: Path) -> None:
    words = ("-p", "2,4", "-n", "1", "-b", "1,2", "-r", 3, "--routers", "top_k,elbow:cap=4", "--seed", 7)
    document = cli("bench", "-m", folder, *words, "--backends", "bucketed,reference", "--json").document
    rows = document["rows"]
    assert [(row["test"], row["batch"], row["backend"], row["router"]) for row in rows] == [
        (test, batch, backend, router)
        for batch, test in [(1, "pp2"), (1, "pp4"), (2, "pp2"), (2, "pp4"), (1, "tg1"), (2, "tg1")]
        for backend in ("bucketed", "reference")
        for router in ("top_k", "elbow:cap=4")
    ]
    for row in rows:
        tokens = int(row["test"][2:]) * row["batch"]
        speeds = sorted(tokens / second for second in row["seconds"])
        assert len(speeds) == 3
        assert row["tokens_per_second"] == pytest.approx(speeds[1])
        assert row["low"] == pytest.approx((speeds[0] + speeds[1]) / 2)
        assert row["high"] == pytest.approx((speeds[1] + speeds[2]) / 2)
        assert row["mean_k"] == 8 if row["router"] == "top_k" else 1 <= row["mean_k"] <= 4
        assert (row["dtype"], row["model"]) == ("float32", str(folder))
    assert (document["repetitions"], document["seed"]) == (3, 7)


def test_bench_tables_hold_the_same_rows(cli: Cli, folder: Path) -> None:
    words = ("bench", "-m", folder, "-p", 4, "-n", 2, "-r", 1, "--router", "top_k", "--router", "top_p:p=0.5,cap=9")
    rows = list(csv.DictReader(io.StringIO(cli(*words, "-o", "csv").out)))
    shown = cli(*words)
    lines = shown.out.splitlines()
    assert shown.err == "".join(f"{note}\n" for note in minimoe.load(folder).notes)  # no bar
    assert len(rows) == 4
    assert len(lines) == 2 + 4
    assert len({len(line) for line in lines}) == 1
    assert set(lines[1]) <= set("|-: ")
    assert [cell.strip() for cell in lines[0].strip("|").split("|")][4:9] == [
        "router",
        "threads",
        "test",
        "batch",
        "mean k",
    ]
    for row, line in zip(rows, lines[2:], strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[:1] + cells[2:8] == [
            row[key] for key in ("model", "dtype", "backend", "router", "threads", "test", "batch")
        ]
        assert cells[1] == count(int(row["parameters"]))
        assert cells[8] == f"{float(row['mean_k']):.2f}"
    assert [row["router"] for row in rows] == ["top_k", "top_p:p=0.5,cap=9"] * 2


NAMES = st.sampled_from([*ROUTERS, "./my_rule.py:Mine", "package.rules:Mine"])
KEYS = st.lists(st.builds("{}={}".format, st.sampled_from(["cap", "floor", "p"]), st.sampled_from(["0", "1", "0.5"])))
SPECS = st.builds(lambda name, keys: f"{name}:{','.join(keys)}" if keys else name, NAMES, KEYS)


@settings(deadline=None, max_examples=50)
@given(st.lists(SPECS, min_size=1, unique=True), st.sampled_from([",", ", "]))
def test_specs_split_where_they_were_joined(specs: list[str], comma: str) -> None:
    assert split_specs([comma.join(specs)]) == specs
    assert split_specs(specs) == specs


def test_whole_numbers() -> None:
    assert whole_numbers("-p", "128, 512,128", least=0) == [128, 512]
    for text in ("", "1,,2", "-1", "x", "1e3", "70000", "9" * 5000):
        with pytest.raises(InputError, match="-p takes whole numbers from 0"):
            whole_numbers("-p", text, least=0)


@pytest.mark.parametrize(
    ("number", "text"),
    [(7, "7"), (1500, "1.5 k"), (6919161856, "6.919 B"), (999_999_999, "1000 M"), (2.5e12, "2.5 T")],
)
def test_count_for_people(number: int, text: str) -> None:
    assert count(number) == text


RULES = """
from minimoe.routers import PrefixRouter, Router
from minimoe.routing import Routing

print("imported")

class Talks(PrefixRouter):
    def count(self, sorted_probs_TE, context):
        print("routing")
        return sorted_probs_TE.argmax(1) + 1

class Lists(Router):
    def route(self, logits_TE, context):
        return Routing([[0]], None, None, logits_TE.shape[1])

class Quits(PrefixRouter):
    def __init__(self):
        raise SystemExit(3)

    def count(self, sorted_probs_TE, context):
        return sorted_probs_TE.argmax(1) + 1

class Odd(PrefixRouter):
    def __init__(self, far=float("inf"), kind=print):
        super().__init__()

    def count(self, sorted_probs_TE, context):
        return sorted_probs_TE.argmax(1) + 1
"""


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.py"
    path.write_text(RULES)
    return path


def test_what_a_rule_prints_does_not_reach_stdout(cli: Cli, folder: Path, rules: Path) -> None:
    run = cli("generate", "Once", "-m", folder, "-r", f"{rules}:Talks", "-n", "2", "--json")
    assert run.code == 0
    assert len(json.loads(run.out)["tokens"]) == 2
    assert "routing" in run.err


@pytest.mark.parametrize(("name", "says"), [("Lists", "three tensors"), ("Quits", "SystemExit")])
def test_a_rule_that_misbehaves_is_told_in_a_sentence(
    cli: Cli, folder: Path, rules: Path, name: str, says: str
) -> None:
    run = cli("generate", "Once", "-m", folder, "-r", f"{rules}:{name}", "-n", "2")
    assert run.code == 2
    assert says in run.err
    assert "Traceback" not in run.err


def test_defaults_that_json_cannot_hold_are_shown_as_text(cli: Cli, rules: Path) -> None:
    run = cli("routers", f"{rules}:Odd", "--json")
    defaults = {key["name"]: key["default"] for key in json.loads(run.out)["keys"]}
    assert defaults["far"] == "inf"
    assert "print" in defaults["kind"]


def test_no_words_show_the_help(cli: Cli) -> None:
    run = cli()
    assert run.code == 2
    assert run.out == ""
    assert "generate" in run.err
    assert run.err.count("\n") > 10


def test_a_chat_that_breaks_off_keeps_its_turns(cli: Cli, chatty: Path) -> None:
    run = cli("chat", "-m", chatty, "-n", "3", "--json", stdin=b"Hello\n\xff\xfe\n")
    assert run.code == 2
    assert [turn["user"] for turn in json.loads(run.out)["turns"]] == ["Hello"]
    run = cli("chat", "-m", chatty, "-n", "3", stdin=b"x" * (2**20 + 1))
    assert run.code == 2
    assert "too long" in run.err


@pytest.mark.parametrize("path", ["", "folder", "missing/file.svg", "device.svg"])
@pytest.mark.parametrize("option", ["--record", "--plot", "--out"])
def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    cli: Cli, option: str, path: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "device.svg").symlink_to("/dev/null")
    (tmp_path / "text").write_text("The owl sat in the tree. " * 20)
    path = "folder.svg" if (option, path) == ("--plot", "folder") else path
    (tmp_path / "folder.svg").mkdir()
    verbs = {
        "--record": ("generate", "The owl", "-n", 2),
        "--plot": ("compare", "--text", "text", "--window", 8, "--limit", 2, "--no-controls"),
        "--out": ("calibrate", "skip", "--text", "text"),
    }
    run = cli(*verbs[option], "-m", folder, option, path)
    assert (run.code, run.out) == (2, "")
    assert run.err.count("\n") == 1
    assert option in run.err


def test_nothing_run_is_nothing_to_record(cli: Cli, folder: Path, tmp_path: Path) -> None:
    run = cli("generate", "The owl", "-m", folder, "-n", 0, "--record", tmp_path / "r.npz")
    assert (run.code, run.out) == (2, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "line",
    [
        '{"ctx": "x", "endings": ["a"], "label": 1e400}',
        '{"ctx": "x", "endings": ["a", "b"], "label": 0.7}',
        '{"ctx": "x", "endings": ["a", "b"], "label": true}',
        '{"ctx": "x", "endings": "ab", "label": 0}',
        "[" * 100_000,
    ],
    ids=lambda line: line[:48],
)
def test_a_line_that_is_no_cloze_item_is_named(cli: Cli, folder: Path, tmp_path: Path, line: str) -> None:
    file = tmp_path / "items.jsonl"
    good = json.dumps({"ctx": "The owl", "endings": ["sat", "ran\u2028on"], "label": "1"}, ensure_ascii=False)
    file.write_text(f"\ufeff{good}\n{line}\n{good}\n", "utf-8")
    run = cli("compare", "--cloze", file, "-m", folder, "--no-controls")
    assert (run.code, run.out) == (2, "")
    assert f"line 2 of {file} is no cloze item" in run.err


def test_every_whole_number_is_a_seed_of_compare(cli: Cli, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("The owl sat in the tree. " * 20)
    words = ("compare", "--text", tmp_path / "text", "-m", folder, "--window", 8, "--limit", 2, "--no-controls")
    assert cli(*words, "--seed", -1).code == 0


def test_an_absurd_number_of_kept_experts_is_all_of_them(cli: Cli, folder: Path) -> None:
    words = ("generate", "The owl", "-m", folder, "-n", 2, "--temperature", 0)
    many = cli(*words, "--router", f"random_tail:keep={10**30}")
    assert many.code == 0
    assert many.out == cli(*words).out
