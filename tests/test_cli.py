"""The command line: what goes to stdout and what does not, exit codes, and one sentence for every bad input."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli, Run, assert_one_sentence, process
from safetensors.torch import load_file, save_file

import minimoe
import minimoe.engine
from minimoe.cli import main
from minimoe.cli.options import DEFAULT_DEVICE, DEFAULT_MODEL, DEFAULT_ROUTER, count
from minimoe.engine import DTYPES
from minimoe.experts import BACKENDS

VERBS = ("generate", "chat", "routers", "bench", "compare", "calibrate", "download")


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


def test_notes_of_the_engine_are_told(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minimoe.engine.has_native_half", lambda dtype: False)
    for verb in (("generate", "-n", 1), ("bench", "-p", 2, "-n", 0, "-r", 1)):
        run = cli(*verb, "-m", folder, "--dtype", "float16")
        assert run.err.count("no instructions for float16") == 1


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
    # A shell's background job ignores the signal, and so would its children.
    hear = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    running = process(["generate", "--prompt-file", "-"], stdin=subprocess.PIPE, preexec_fn=hear)
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


@pytest.mark.parametrize(
    ("number", "text"),
    [(7, "7"), (1500, "1.5 k"), (6919161856, "6.919 B"), (999_999_999, "1000 M"), (2.5e12, "2.5 T")],
)
def test_count_for_people(number: int, text: str) -> None:
    assert count(number) == text


def test_no_words_show_the_help(cli: Cli) -> None:
    run = cli()
    assert run.code == 2
    assert run.out == ""
    assert "generate" in run.err
    assert run.err.count("\n") > 10


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
