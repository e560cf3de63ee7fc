"""The options that several verbs share, and what they do with them: load an engine, and say what runs."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import minimoe
from minimoe.cli.terminal import reading
from minimoe.errors import InputError
from minimoe.hub import EMBEDDED
from minimoe.whole_file import fresh_of

if TYPE_CHECKING:
    from minimoe.engine import Engine

DEFAULT_MODEL = EMBEDDED
DEFAULT_ROUTER = "top_k"
DEFAULT_DEVICE = "cpu"

Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", metavar="NAME", help="The embedded model (tiny), a folder, or a name on the Hugging Face hub."
    ),
]
RouterSpec = Annotated[
    str,
    typer.Option(
        "--router",
        "-r",
        metavar="SPEC",
        help="The routing rule: name, name:key=value,key=value, or your own as path.py:Class. See 'minimoe routers'.",
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="How the experts are run: native, bucketed, reference, triton. By default native where its kernels run.",
    ),
]
DType = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="NAME", help="float32, bfloat16 or float16. By default what the checkpoint is stored in."
    ),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda or cuda:N.")]
Threads = Annotated[
    int | None, typer.Option(metavar="N", min=1, max=1024, help="CPU threads. By default torch's own choice.")
]
Seed = Annotated[int, typer.Option(metavar="N", help="Seed of everything that is drawn.")]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout, and nothing else there.")]

MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", "-n", metavar="N", min=0, help="Stop after so many tokens.")
]
Temperature = Annotated[float, typer.Option(metavar="T", help="0 always takes the most probable token.")]
TopK = Annotated[int, typer.Option(metavar="K", help="Draw from the k most probable tokens; 0 is off.")]
TopP = Annotated[
    float, typer.Option(metavar="P", help="Draw from the smallest set of tokens that reaches p; 1 is off.")
]
MinP = Annotated[
    float, typer.Option(metavar="P", help="Drop tokens under this fraction of the best one's probability; 0 is off.")
]
RepetitionPenalty = Annotated[
    float, typer.Option(metavar="X", help="Above 1, tokens already there become less likely; 1 is off.")
]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="A text that ends the answer; can be repeated.")]


def check_sampling(**options: Any) -> dict[str, Any]:
    """The same options, refused before a large model is loaded rather than after.

    Raises:
        InputError: a value outside its range.
    """
    from minimoe.sampling import Sampling

    Sampling(**options)
    return options


def needed(*files: str | None, models: Iterable[str | None] = (), specs: Iterable[str | None] = ()) -> list[Path]:
    """What a command reads, and no output may replace: files, the folders of models, and what SPECs name."""
    from minimoe.routers.spec import files_of

    read = [Path(file) for file in files if file]
    read += [Path(model) for model in models if model and Path(model).is_dir()]
    return read + [file for spec in specs if spec for file in files_of(spec)]


def check_output(option: str, path: str, others: Iterable[Path] = ()) -> None:
    """Refuse a file that cannot be written, before there is work to lose.

    Args:
        others: files that are read or written besides, and folders of models: neither the file nor what it is made in
            may replace one of them.

    Raises:
        InputError: names the option and the reason.
    """
    place = Path(path)
    if not path or place.is_dir():
        raise InputError(f"{option} needs the name of a file, not {path!r}.")
    if place.exists() and not place.is_file():
        raise InputError(f"{option} cannot write {path}: it is not a plain file.")
    if not place.parent.is_dir():
        raise InputError(f"{option} cannot write {path}: there is no folder {place.parent}.")
    if not os.access(place if place.exists() else place.parent, os.W_OK):
        raise InputError(f"{option} cannot write {path}: permission denied.")
    unfinished = (Path(f"{path}.part"), fresh_of(path))  # where the work goes until it is done
    for beside in unfinished:
        if beside.is_dir():
            raise InputError(f"{option} cannot write {path}: {beside} is a folder.")
    touched = {file.resolve(): file for file in (place, *unfinished)}
    for other in map(Path.resolve, others):
        for file, shown in touched.items():
            if file == other or (file.exists() and file.is_relative_to(other)):
                raise InputError(f"{option} would replace {shown}, which this command needs; name another file.")


def check_in_spec(option: str, path: str) -> None:
    """Refuse the name of a file that no SPEC could name afterwards: a comma parts its keys.

    Raises:
        InputError: names the option.
    """
    if "," in path or path != path.strip():
        raise InputError(f"{option} cannot be {path!r}: a rule could not be told to read a file of that name.")


def make_folder(out: str, *names: str, others: Iterable[Path] = ()) -> Path:
    """The folder of --out, made where it is not there yet.

    Args:
        names: the files that will be written into it.
        others: see check_output.

    Raises:
        InputError: it cannot be made or written, or one of the files cannot.
    """
    folder = Path(out)
    if not out or (folder.exists() and not folder.is_dir()):
        raise InputError(f"--out needs the name of a folder, not {out!r}.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out cannot make {out}: {error.strerror or error}.") from None
    if not os.access(folder, os.W_OK):
        raise InputError(f"--out cannot write {out}: permission denied.")
    for name in names:
        check_output("--out", str(folder / name), others)
    return folder


def load_engine(
    model: str, router: str, backend: str | None, dtype: str | None, device: str, threads: int | None
) -> Engine:
    """Load a model with a rule that may be the user's own.

    Raises:
        InputError: as minimoe.load does.
    """
    from minimoe.cli.own_rule import read_router
    from minimoe.engine import load

    rule = read_router(router)
    with reading() as progress:
        return load(model, router=rule, backend=backend, dtype=dtype, device=device, threads=threads, progress=progress)


def describe(engine: Engine) -> dict[str, Any]:
    """What runs: model, number of parameters, dtype, backend, device and CPU threads."""
    import torch

    return {
        "model": engine.name,
        "parameters": engine.weight_bytes // engine.model.dtype.itemsize,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "backend": engine.backend,
        "device": str(engine.model.device),
        "threads": torch.get_num_threads(),
    }


def headline(facts: dict[str, Any], router: str) -> str:
    """One line for people on what runs."""
    threads = f" with {facts['threads']} threads" if facts["device"] == "cpu" else ""
    return (
        f"{facts['model']}, {count(facts['parameters'])} parameters, {facts['dtype']}, {facts['backend']} backend "
        f"on {facts['device']}{threads}, router {router}"
    )


def count(number: int, billion: str = "B") -> str:
    """A large number for people: 6.919 B, 12.34 M, 45.1 k; units of measurement have G for the billion."""
    for size, letter in ((1e12, "T"), (1e9, billion), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.4g} {letter}"
    return str(number)


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    import torch

    return {"minimoe": minimoe.__version__, "torch": torch.__version__, "python": platform.python_version()}
