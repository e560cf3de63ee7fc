"""`minimoe calibrate`: fit a routing rule to a text."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minimoe.cli import options
from minimoe.cli.compare import read_text
from minimoe.cli.terminal import tell, working, write, write_json
from minimoe.errors import InputError

if TYPE_CHECKING:
    from minimoe.engine import Engine
    from minimoe.items import Item


FEW_TOKENS = 1000


def calibrate(
    rule: Annotated[
        str,
        typer.Argument(metavar="RULE", help="skip, top_any or layer_k; or any SPEC with --mean-k, as top_p:cap=16."),
    ],
    text: Annotated[str, typer.Option(metavar="FILE", help="The text to fit to, UTF-8.")],
    out: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="Where the result goes, as JSON: what skip, top_any and layer_k read."
        ),
    ] = None,
    mean_k: Annotated[
        float | None, typer.Option(metavar="K", help="Wanted mean k; for top_any and layer_k the model's by default.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            show_default="its only one that takes any number",
            help="The key of RULE to fit to the mean k.",
        ),
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    window: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of one window of the text.")] = 512,
    backend: options.Backend = None,
    dtype: options.DType = None,
    device: options.Device = options.DEFAULT_DEVICE,
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Fit a rule to a text: what skip, top_any and layer_k read from a file, or any rule's key to a wanted mean k.

    With --out, a run that was cut off goes on where it was when the same command is given again.
    """
    from minimoe.fitting import FITTED, check

    if out is not None:
        options.check_output("--out", out, options.needed(text, models=[model], specs=[rule]))
    written = read_text(text)
    fitted = rule.strip().replace("-", "_")
    by_key = key is not None or fitted not in FITTED
    if by_key:
        key, mean_k = _check_key(rule, key, mean_k)
    elif out is None:
        raise InputError(f"{fitted} reads what is fitted from a file; say with --out FILE where it goes.")
    else:
        options.check_in_spec("--out", out)
        check(fitted, mean_k)
    engine = options.load_engine(model, options.DEFAULT_ROUTER, backend, dtype, device, threads)
    for line in engine.notes:
        tell(line)
    from minimoe.items import text_items

    items = text_items(engine, written, window)
    tokens = sum(len(item.contexts[0]) + len(item.continuations[0]) for item in items)
    if tokens < FEW_TOKENS:
        tell(f"the text has only {tokens} tokens; what is fitted to so few may be far from what longer ones need.")
    if key is not None and mean_k is not None and by_key:
        document = _tune(engine, rule, key, mean_k, items, out)
        reached = f"mean k {document['mean_k']:.4f}, where {mean_k:g} was wanted, on {document['tokens']} tokens"
        tell(f"{reached}; use it as --router {document['router']}")
    else:
        document = _fit(engine, fitted, mean_k, items, str(out))
        tell(f"fitted to {document['tokens']} tokens; use it as --router {fitted}:file={out}")
    if json:
        write_json(document)
    else:
        write(f"{document['router'] if by_key else out}\n")


def _check_key(rule: str, key: str | None, mean_k: float | None) -> tuple[str, float]:
    """The key to fit and the mean k to fit it to, refused before a large model is loaded rather than after.

    Raises:
        InputError: a rule without such a key, no mean k, or one that is no number above 0.
    """
    from minimoe.cli.own_rule import read_router
    from minimoe.tuning import FIRST, candidates, key_of

    with contextlib.redirect_stdout(sys.stderr):  # what a user's file prints when it is imported
        key = key_of(rule, key)
    if mean_k is None:
        raise InputError(f"say with --mean-k to what mean k {key} of {rule} is to be fitted.")
    if not 0 < mean_k < float("inf"):
        raise InputError(f"the mean k must be a number above 0, not {mean_k:g}.")
    candidates(rule, key, FIRST, read_router)
    return key, mean_k


def _tune(engine: Engine, rule: str, key: str, mean_k: float, items: list[Item], out: str | None) -> dict[str, Any]:
    from minimoe.cli.own_rule import read_router
    from minimoe.tuning import ROUNDS, tune

    with working((ROUNDS + 1) * len(items)) as ran:
        return tune(engine, rule, key, mean_k, items, out, read=read_router, ran=lambda: ran("fitting"))


def _fit(engine: Engine, rule: str, mean_k: float | None, items: list[Item], out: str) -> dict[str, Any]:
    from minimoe.fitting import calibrate as fit

    with working(len(items)) as ran:
        return fit(engine, rule, items, out, mean_k=mean_k, ran=lambda: ran("fitting"))
