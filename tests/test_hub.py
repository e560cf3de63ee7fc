"""The hub, played by a small server on this machine: every way it can give a model, and every way it can fail to."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub.constants
import huggingface_hub.file_download
import pytest
from huggingface_hub.utils import enable_progress_bars

import minimoe.hub
from minimoe.errors import InputError
from minimoe.hub import resolve

MODEL = "someone/some-model"
TOKEN = "hf_SecretSecretSecret"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
WANTED = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "tokenizer.json": b"{'t'}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"hi",
    "model.safetensors.index.json": (
        b'{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    ),
    "model-00001-of-00002.safetensors": b"first" * 1000,
    "model-00002-of-00002.safetensors": b"second" * 1000,
}
UNWANTED = {"pytorch_model.bin": b"pickle", "README.md": b"read me", "original/model.safetensors": b"a copy"}


class FakeHub(ThreadingHTTPServer):
    """Serves one model, or fails as told.

    Attributes:
        files: what the model consists of.
        failure: an HTTP status to answer with, "hang", or None.
        failing: "api" (the questions about a model) or "files" (the downloads).
        code: the hub's own error code, sent beside the status.
        requests: method and path of everything asked.
        tokens: every Authorization header seen.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHubHandler)
        self.files: dict[str, bytes] = {**WANTED, **UNWANTED}
        self.failure: int | str | None = None
        self.failing = "api"
        self.code: str | None = None
        self.requests: list[str] = []
        self.tokens: list[str | None] = []
        self.closing = threading.Event()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class FakeHubHandler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        hub, path = self.server, urlsplit(self.path).path
        hub.requests.append(f"{self.command} {path}")
        hub.tokens.append(self.headers["Authorization"])
        if hub.failure is not None and hub.failing == ("api" if path.startswith("/api/") else "files"):
            if isinstance(hub.failure, str):
                hub.closing.wait(30)
                return
            self.answer(b"no", hub.failure, {"X-Error-Code": hub.code} if hub.code else {})
        elif path.startswith(f"/api/models/{MODEL}/tree/"):
            listing = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in hub.files.items()
            ]
            self.answer(json.dumps(listing).encode())
        elif path in (f"/api/models/{MODEL}", f"/api/models/{MODEL}/revision/main"):
            siblings = [{"rfilename": name} for name in hub.files]
            self.answer(json.dumps({"id": MODEL, "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith(f"/api/models/{MODEL}/revision/"):
            self.answer(b"no", 404, {"X-Error-Code": "RevisionNotFound"})
        elif (name := path.removeprefix(f"/{MODEL}/resolve/{COMMIT}/")) in hub.files:
            etag = {"ETag": f'"{hashlib.sha1(hub.files[name]).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self.answer(hub.files[name], 200, etag)
        else:
            self.answer(b"no", 404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def answer(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    """A running FakeHub, which huggingface_hub takes for the real one."""
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    pattern = server.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.address)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", pattern)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.closing.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timeouts of a fraction of a second, and no pauses between huggingface_hub's own attempts."""
    monkeypatch.setattr(minimoe.hub, "TIMEOUT", 0.3)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    monkeypatch.setattr(huggingface_hub.file_download, "_ETAG_RETRY_TIMEOUT", 0.2, raising=False)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(*args: Any, **options: Any) -> str:
    """The sentence with which `resolve` refuses; it is one line, and not even its traceback holds the token."""
    with pytest.raises(InputError) as caught:
        resolve(*args, **options)
    sentence = str(caught.value)
    assert TOKEN not in "".join(traceback.format_exception(caught.value))
    assert "\n" not in sentence
    assert sentence.endswith(".")
    return sentence


def test_downloads_what_the_engine_reads_and_nothing_else(hub: FakeHub, tmp_path: Path) -> None:
    assert contents(resolve(MODEL, cache_dir=tmp_path)) == WANTED
    assert f"Bearer {TOKEN}" in hub.tokens


def test_downloads_once(hub: FakeHub, tmp_path: Path) -> None:
    first = resolve(MODEL, cache_dir=tmp_path)
    hub.requests.clear()
    assert resolve(MODEL, cache_dir=tmp_path) == first
    assert not [request for request in hub.requests if "/resolve/" in request]


def test_revision_is_asked_for(hub: FakeHub, tmp_path: Path) -> None:
    assert contents(resolve(MODEL, revision="main", cache_dir=tmp_path)) == WANTED
    assert f"GET /api/models/{MODEL}/revision/main" in hub.requests
    assert "no revision 'v9'" in refusal(MODEL, revision="v9", cache_dir=tmp_path)


def test_offline_with_a_complete_cache_asks_nothing(hub: FakeHub, tmp_path: Path) -> None:
    folder = resolve(MODEL, cache_dir=tmp_path)
    hub.requests.clear()
    assert resolve(MODEL, cache_dir=tmp_path, offline=True) == folder
    assert hub.requests == []


def test_offline_without_a_cache(hub: FakeHub, tmp_path: Path) -> None:
    sentence = refusal(MODEL, cache_dir=tmp_path, offline=True)
    assert "in the cache" in sentence
    assert f"download {MODEL}" in sentence
    assert hub.requests == []


def test_offline_with_an_incomplete_cache(hub: FakeHub, tmp_path: Path) -> None:
    (resolve(MODEL, cache_dir=tmp_path) / "model-00002-of-00002.safetensors").unlink()
    assert "not all of it" in refusal(MODEL, cache_dir=tmp_path, offline=True)


def test_offline_by_environment(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refusal(MODEL, cache_dir=tmp_path)
    assert hub.requests == []


@pytest.mark.parametrize("failure", [401, 403, 404, 500, "hang"])
@pytest.mark.usefixtures("impatient")
def test_a_complete_cache_survives_a_failing_hub(hub: FakeHub, tmp_path: Path, failure: int | str) -> None:
    folder = resolve(MODEL, cache_dir=tmp_path)
    hub.failure = failure
    assert resolve(MODEL, cache_dir=tmp_path) == folder


@pytest.mark.parametrize(
    ("failure", "code", "advice"),
    [
        (401, None, ["HTTP 401", "spelling", "HF_TOKEN"]),
        (401, "GatedRepo", ["gated", "licence", f"/{MODEL}", "HF_TOKEN"]),
        (403, "GatedRepo", ["gated", "licence", f"/{MODEL}", "HF_TOKEN"]),
        (403, None, ["gated", "licence", "HF_TOKEN"]),
        (404, "RepoNotFound", ["no model", "spelling", "no folder"]),
        (404, None, ["no model", "spelling"]),
        (429, None, ["too often", "wait"]),
        (500, None, ["HTTP 500", "fault on its side", "later"]),
        (503, None, ["HTTP 503", "fault on its side", "later"]),
        ("hang", None, ["did not answer in time", "network"]),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_each_failure_has_its_own_advice(
    hub: FakeHub, tmp_path: Path, failure: int | str, code: str | None, advice: list[str]
) -> None:
    hub.failure, hub.code = failure, code
    sentence = refusal(MODEL, cache_dir=tmp_path)
    assert all(part in sentence for part in advice), sentence


@pytest.mark.parametrize(("failure", "advice"), [(500, "HTTP 500"), ("hang", "did not answer in time")])
@pytest.mark.usefixtures("impatient")
def test_failure_in_the_middle_of_a_download(hub: FakeHub, tmp_path: Path, failure: int | str, advice: str) -> None:
    hub.failure, hub.failing = failure, "files"
    assert advice in refusal(MODEL, cache_dir=tmp_path)
    hub.failure = None
    assert contents(resolve(MODEL, cache_dir=tmp_path)) == WANTED


@pytest.mark.usefixtures("impatient")
def test_nobody_listens(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    sentence = refusal(MODEL, cache_dir=tmp_path)
    assert "could not be reached" in sentence
    assert "127.0.0.1:9" in sentence


def test_token_that_cannot_be_sent(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}é")
    assert "HF_TOKEN holds a character" in refusal(MODEL, cache_dir=tmp_path)
    assert hub.requests == []


def test_full_disk(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface_hub.file_download, "http_get", no_space)
    assert "disk is full" in refusal(MODEL, cache_dir=tmp_path)


def test_cache_that_is_no_folder(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    sentence = refusal(MODEL, cache_dir=tmp_path / "cache")
    assert str(tmp_path / "cache") in sentence
    assert "HF_HOME" in sentence


def test_model_without_safetensors(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    assert "no safetensors files" in refusal(MODEL, cache_dir=tmp_path)
    assert not [request for request in hub.requests if "/resolve/" in request]


def test_local_folders_and_the_embedded_model_never_touch_the_hub(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / MODEL).mkdir(parents=True)
    monkeypatch.setattr(minimoe.hub, "__file__", str(tmp_path / "minimoe" / "hub.py"))
    (tmp_path / "weights" / "tiny").mkdir(parents=True)
    assert resolve(MODEL) == Path(MODEL)
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve("./not-there") == Path("not-there")
    assert resolve("a/b/c") == Path("a/b/c")
    assert resolve("~/not-there") == Path.home() / "not-there"
    assert resolve("tiny") == tmp_path / "weights" / "tiny"
    assert hub.requests == []


def test_embedded_model_of_an_installed_package_and_of_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minimoe.hub, "__file__", str(tmp_path / "minimoe" / "hub.py"))
    assert "missing from this installation" in refusal("tiny")
    (tmp_path / "minimoe" / "weights" / "tiny").mkdir(parents=True)
    assert resolve("tiny") == tmp_path / "minimoe" / "weights" / "tiny"


@pytest.mark.parametrize(
    "name", ["", " ", "olmoe", "two words", "owner/na me", "-x/y", "ówner/name", "x" * 5000, "a\0b"]
)
def test_what_is_neither_lists_what_is_accepted(hub: FakeHub, name: str) -> None:
    sentence = refusal(name)
    assert "'tiny'" in sentence
    assert "folder" in sentence
    assert "allenai/OLMoE-1B-7B-0924" in sentence
    assert hub.requests == []


@pytest.mark.parametrize("name", ["a--b/c", "a/b..c", "a/b.git"])
def test_names_that_the_hub_library_refuses(hub: FakeHub, tmp_path: Path, name: str) -> None:
    assert f"{name!r} is neither" in refusal(name, cache_dir=tmp_path)
    assert hub.requests == []


def test_revision_of_a_local_folder(tmp_path: Path) -> None:
    assert "revision" in refusal(str(tmp_path), revision="main")


def test_progress_shows_on_a_terminal(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enable_progress_bars()  # another library may have turned them off in this process
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    resolve(MODEL, cache_dir=tmp_path)
    assert "100%" in terminal.getvalue()


def test_environment_variables_and_what_is_printed(hub: FakeHub, tmp_path: Path) -> None:
    """In a process of its own: HF_ENDPOINT, HF_HOME and HF_TOKEN count, and nothing is printed but what is asked."""
    script = f"""
from minimoe.errors import InputError
from minimoe.hub import resolve
print(resolve({MODEL!r}))
try:
    resolve("someone/else")
except InputError as error:
    print(error)
"""
    environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path), "HF_TOKEN": TOKEN}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    folder, sentence = done.stdout.splitlines()
    assert contents(Path(folder)) == WANTED
    assert tmp_path in Path(folder).parents
    assert "HTTP 404" in sentence
    assert done.stderr == ""
    assert f"Bearer {TOKEN}" in hub.tokens
    assert TOKEN not in done.stdout
