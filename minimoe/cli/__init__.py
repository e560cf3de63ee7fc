"""The command line: `main` runs a verb, and is the one place where an exception becomes a sentence and an exit code.

Nothing imported from here on down to the verbs' own functions may import torch: help must answer at once.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import minimoe
from minimoe.cli import analyze, bench, calibrate, chat, compare, download, evaluate, generate, paper, routers
from minimoe.cli.terminal import tell, write
from minimoe.errors import InputError, NumericalError

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
# What pydantic, which checks values under typer, says; and what a person would.
PLAIN = {
    "Value error, ": "",
    "Input should be a valid integer.*": "it must be a whole number",
    "Input should be a valid number.*": "it must be a number",
    "Input should be greater than or equal to ": "it must be at least ",
    "Input should be less than or equal to ": "it must be at most ",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the words after the program's name; by default those of the process.

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong usage or bad input, 130 interrupted. Whatever a person can mend
        is one sentence on stderr; an exception that comes out of here is a bug.
    """
    if sys.stderr is None:  # closed by the caller: there is nobody to tell
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - it lives as long as the process
    try:
        if sys.stdout is None:
            raise InputError("standard output is closed, so there is nowhere to write; redirect it to a file.")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character must not end the text
        code = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
        return code
    except typer.TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the whole help
            tell(error.format_message(), style="")
            return BAD_INPUT
        return _fail(_usage(error), BAD_INPUT)
    except InputError as error:
        return _fail(str(error), BAD_INPUT)
    except NumericalError as error:
        return _fail(str(error), FAILED)
    except BrokenPipeError:  # whoever read has seen enough
        _drop_output()
        return FAILED
    except OSError as error:
        _drop_output()
        code = BAD_INPUT if error.errno == errno.ENAMETOOLONG else FAILED
        return _fail(f"{error.filename or 'reading or writing'} failed: {error.strerror or error}.", code)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        return _fail("there is not enough memory for this; try a smaller batch, prompt or model.", FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(words: Sequence[str]) -> int:
    command = typer.main.get_command(_app())
    try:
        with command.make_context("minimoe", list(words)) as context:
            return command.invoke(context) or DONE
    except typer.Exit as done:  # --help and --version
        return done.exit_code


def _app() -> typer.Typer:
    app = typer.Typer(
        help="Run OLMoE mixture-of-experts models, with routing rules that choose how many experts a token uses.",
        add_completion=False,
        rich_markup_mode=None,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_program)
    for verb in (
        generate.generate,
        chat.chat,
        routers.routers,
        bench.bench,
        compare.compare,
        evaluate.eval,
        calibrate.calibrate,
        analyze.analyze,
        paper.paper,
        download.download,
    ):
        app.command()(verb)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        write(f"minimoe {minimoe.__version__}\n")
        raise typer.Exit


def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself; typer finds them in this signature."""


def _usage(error: typer.TyperException) -> str:
    """A usage error as one sentence, with the way to help."""
    context = getattr(error, "ctx", None)
    message = error.format_message().strip()
    for theirs, ours in PLAIN.items():
        message = re.sub(theirs, ours, message)
    hint = f" Try '{context.command_path} --help'." if context else ""
    return f"{message if message.endswith(('.', '?', '!')) else message + '.'}{hint}"


def _fail(sentence: str, code: int) -> int:
    tell(f"error: {' '.join(sentence.split())}", style="red")
    return code


def _drop_output() -> None:
    """Let what is still in the buffer go nowhere, or the interpreter would complain about it at its end."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, AttributeError):  # a stream without a file
        sys.stdout = io.StringIO()


def _is_out_of_memory(error: Exception) -> bool:
    # torch has a class of its own for GPUs and a plain RuntimeError for the CPU; neither may be imported here.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "DefaultCPUAllocator" in str(error)
    )
