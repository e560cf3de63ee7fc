"""From a model's name to its folder on this machine: the embedded model, a local folder, or the Hugging Face hub."""

from __future__ import annotations

import errno
import os
import re
import sys
from pathlib import Path
from typing import Any

from minimoe.errors import InputError

EMBEDDED = "tiny"
EXAMPLE = "allenai/OLMoE-1B-7B-0924"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "chat_template.jinja",
    "*.safetensors",
    "model.safetensors.index.json",
)
TIMEOUT = 10.0  # seconds without an answer after which the hub counts as unreachable


def resolve(model: str, *, revision: str | None = None, cache_dir: Path | None = None, offline: bool = False) -> Path:
    """The folder of a model; one on the hub is downloaded first, unless it is in the cache of huggingface_hub already.

    When the hub cannot be reached or does not give the model, a complete cached copy is used.

    Args:
        model: "tiny", a path, or "owner/name" on the hub. An existing folder always wins over the hub.
        revision: branch, tag or commit on the hub.
        cache_dir: instead of huggingface_hub's own (HF_HOME or ~/.cache/huggingface).
        offline: use the cache only.

    Raises:
        InputError: not a model's name, or the hub and the cache do not give it; says what to do. A path is not
            checked here, but by what reads it.
    """
    if model == EMBEDDED:
        folder = _embedded_folder()
    elif model.strip() and (os.path.exists(model) or _looks_like_path(model)):
        folder = Path(os.path.expanduser(model))
    elif HUB_ID.fullmatch(model):
        return _from_hub(model, revision, cache_dir, offline)
    else:
        raise InputError(
            f"{model!r} is not a model: give {EMBEDDED!r}, the path of a folder, or a name on the Hugging Face hub "
            f"such as {EXAMPLE!r}."
        )
    if revision is not None:
        raise InputError(f"A revision can be chosen for models on the hub only, and {model!r} is not one.")
    return folder


def _embedded_folder() -> Path:
    package = Path(__file__).parent
    for folder in (package / "weights" / EMBEDDED, package.parent / "weights" / EMBEDDED):
        if folder.is_dir():
            return folder
    raise InputError(f"The embedded model {EMBEDDED!r} is missing from this installation; install minimoe again.")


def _looks_like_path(model: str) -> bool:
    return model.startswith((".", "~", "/")) or "\\" in model or model.count("/") > 1 or model.endswith("/")


def _from_hub(model: str, revision: str | None, cache_dir: Path | None, offline: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    from minimoe.weight_files import weight_files  # imports torch, which help must do without

    options: dict[str, Any] = {
        "revision": revision,
        "cache_dir": cache_dir,
        "allow_patterns": list(FILES),
        "ignore_patterns": ["*/*"],
        "tqdm_class": _progress_bar(),
    }
    failure = None
    if not offline:
        try:
            # Asked here first, because snapshot_download's own first question waits for ever.
            files = HfApi().model_info(model, revision=revision, timeout=TIMEOUT).siblings or []
            if any(file.rfilename.endswith(".safetensors") for file in files):
                return Path(snapshot_download(model, **options))
        # The library, its HTTP client and the file system have exceptions of their own; all mean the same here.
        except Exception as error:
            failure = error
        else:
            raise InputError(f"{model} on the hub has no safetensors files, and minimoe reads no others.")
    try:
        folder = Path(snapshot_download(model, local_files_only=True, **options))
        weight_files(folder)  # the library is content with whatever part of a model it finds
        complete = (folder / "config.json").exists() and (folder / "tokenizer.json").exists()
    except Exception:
        complete = False
    if not complete:
        # Without the failure as its cause: a traceback would print it, and it may quote the token.
        raise InputError(_advice(model, revision, failure)) from None
    return folder


def _advice(model: str, revision: str | None, failure: Exception | None) -> str:
    """One sentence on why the hub did not give the model. It never quotes the failure."""
    from huggingface_hub import constants, errors

    # A failed download of one file arrives as "not in the cache", with the real failure as its cause.
    if isinstance(failure, FileNotFoundError) and isinstance(failure.__cause__, Exception):
        failure = failure.__cause__
    download = f"run 'python -m minimoe download {model}' once with a network"
    page = f"{constants.ENDPOINT}/{model}"
    status = getattr(getattr(failure, "response", None), "status_code", None)
    if failure is None:
        return f"{model} is not a folder here, and not (or not all of it) in the cache; {download}."
    if isinstance(failure, errors.OfflineModeIsEnabled):
        return f"{model} is not (or not all of it) in the cache, and HF_HUB_OFFLINE is set; unset it, then {download}."
    if isinstance(failure, errors.HFValidationError):
        return f"{model!r} is neither a folder here nor a name that the hub allows; check the spelling."
    if isinstance(failure, UnicodeEncodeError):
        return "HF_TOKEN holds a character that no access token has; set it again."
    if isinstance(failure, errors.RevisionNotFoundError):
        return f"{model} has no revision {revision!r}; see {page} for its branches and tags."
    if isinstance(failure, errors.GatedRepoError) or status == 403:
        return (
            f"The hub refuses {model} (HTTP {status}): if it is gated, accept its licence on {page}, and set HF_TOKEN "
            "to an access token that may read it."
        )
    if status == 401:
        return (
            f"The hub does not show {model} to just anyone (HTTP 401), and there is no folder of that name here: check "
            "the spelling, and if the model is private or gated set HF_TOKEN to a valid access token."
        )
    if status == 404:
        return f"There is no model {model} on the hub (HTTP 404) and no folder of that name here; check the spelling."
    if status == 429:
        return "The hub says that it was asked too often (HTTP 429); wait a few minutes, or set HF_TOKEN."
    if status is not None:
        return f"The hub failed to give {model} (HTTP {status}), which is a fault on its side; try again later."
    if isinstance(failure, OSError) and failure.errno == errno.ENOSPC:
        return f"The disk is full, so {model} could not be stored; free some space, or set HF_HOME to a larger disk."
    if isinstance(failure, OSError) and failure.filename is not None:
        return f"{failure.filename} cannot be used ({failure.strerror}), so {model} could not be stored; set HF_HOME."
    if "Timeout" in type(failure).__name__:
        return (
            f"The hub at {constants.ENDPOINT} did not answer in time, and {model} is not in the cache; "
            "check the network, or try again later."
        )
    return (
        f"The hub at {constants.ENDPOINT} could not be reached ({type(failure).__name__}), and {model} is not in the "
        "cache; check the network, the proxy and HF_ENDPOINT."
    )


def _progress_bar() -> type[Any]:
    """huggingface_hub's progress bar, which goes to stderr, made silent where stderr is not a terminal."""
    from huggingface_hub.utils import tqdm

    class ProgressBar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": options.get("disable") or not sys.stderr.isatty()})

    return ProgressBar
