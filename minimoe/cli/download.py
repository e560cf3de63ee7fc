"""`minimoe download`: fetch a model from the hub, so that it runs without a network later."""

from __future__ import annotations

from typing import Annotated

import typer

from minimoe.cli.terminal import write


def download(
    model: Annotated[str, typer.Argument(help="A name on the Hugging Face hub, such as allenai/OLMoE-1B-7B-0924.")],
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit.")] = None,
) -> None:
    """Download a model and print its folder.

    Files that are there already are not fetched again, and the model is checked to be complete.
    """
    from minimoe.checkpoint import read_checkpoint
    from minimoe.hub import resolve
    from minimoe.tokenizer import Tokenizer

    folder = resolve(model, revision=revision)
    read_checkpoint(folder)  # maps the files and compares them with config.json; reads no weights
    Tokenizer.from_folder(folder)
    write(f"{folder}\n")
