"""`minimoe calibrate`: fit what a routing rule reads, from a text."""

from __future__ import annotations

from typing import Annotated

import typer

from minimoe.cli import options
from minimoe.cli.compare import read_text
from minimoe.cli.terminal import tell, write, write_json


def calibrate(
    rule: Annotated[str, typer.Argument(metavar="RULE", help="skip, top_any or layer_k.")],
    text: Annotated[str, typer.Option(metavar="FILE", help="The text to fit to, UTF-8.")],
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="Where the small JSON file goes.")],
    mean_k: Annotated[
        float | None, typer.Option(metavar="K", help="Wanted mean k, for top_any and layer_k; the model's by default.")
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    window: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of one window of the text.")] = 512,
    backend: options.Backend = None,
    dtype: options.DType = None,
    device: options.Device = options.DEFAULT_DEVICE,
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Fit a rule to a text. A run that was cut off goes on where it was when the same command is given again."""
    options.check_output("--out", out)
    written = read_text(text)
    from minimoe.fitting import calibrate as fit
    from minimoe.items import text_items

    engine = options.load_engine(model, options.DEFAULT_ROUTER, backend, dtype, device, threads)
    document = fit(engine, rule, text_items(engine, written, window), out, mean_k=mean_k)
    tell(f"fitted to {document['tokens']} tokens; use it as --router {rule}:file={out}")
    if json:
        write_json(document)
    else:
        write(f"{out}\n")
