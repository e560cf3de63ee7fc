"""`minimoe analyze`: what a router does on texts, counted once, then told in tables, figures and files."""

from __future__ import annotations

import json as json_format
from typing import Annotated, Any

import typer

from minimoe.cli import options
from minimoe.cli.terminal import reading, tell, write, write_json
from minimoe.errors import InputError
from minimoe.tables import markdown
from minimoe.whole_file import write_whole

DATA, SUMMARY = "analysis.npz", "summary.json"
WINDOW = 512
ALL = "all"


def analyze(
    texts: Annotated[
        list[str], typer.Argument(metavar="[DOMAIN=]FILE...", help="Texts, UTF-8, plain or .xz; each is a domain.")
    ],
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="DIR", help="Where the data, the summary and the figures go.")
    ],
    model: options.Model = options.DEFAULT_MODEL,
    router: Annotated[
        str, typer.Option("--router", "-r", metavar="SPEC", help="The rule under which the text is run.")
    ] = "elbow",
    window: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, show_default="512, or what the context holds", help="Tokens of one window of a text."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=2**31, help="Only the first N windows of each text.")
    ] = None,
    new_tokens: Annotated[
        int, typer.Option(metavar="N", min=0, help="Tokens to write after each window: the decode phase.")
    ] = 0,
    versus: Annotated[
        str | None, typer.Option(metavar="SPEC", help="Another rule: how far do the two choose alike?")
    ] = None,
    versus_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Another checkpoint of the same shape, for the same question.")
    ] = None,
    adjacent: Annotated[
        bool, typer.Option(help="Show co-activation as OLMoE's own repository counts it: neighbours in rank alone.")
    ] = False,
    figures: Annotated[bool, typer.Option(help="Draw the figures; needs matplotlib.")] = True,
    backend: options.Backend = None,
    dtype: options.DType = None,
    device: options.Device = options.DEFAULT_DEVICE,
    threads: options.Threads = None,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Analyse the routers of a model on texts: experts, elbows, load, co-activation, specialisation, by layer.

    A run that was cut off goes on where it was when the same command is given again.
    """
    options.check_sampling(seed=seed)
    from minimoe.analysis.run import Versus
    from minimoe.analysis.run import analyze as run
    from minimoe.analysis.summary import summarise
    from minimoe.analysis.texts import parse_texts, size, text_source
    from minimoe.cli.own_rule import read_router

    sources = parse_texts(texts)
    read_from = options.needed(*(str(s.path) for s in sources), models=[model, versus_model], specs=[router, versus])
    folder = options.make_folder(out, DATA, SUMMARY, others=read_from)
    rule = read_router(router)
    other_rule = None if versus is None else read_router(versus)
    engine = options.load_engine(model, options.DEFAULT_ROUTER, backend, dtype, device, threads)
    context = engine.config.max_positions
    if new_tokens >= context:
        raise InputError(f"{new_tokens} new tokens leave no room for a window in the model's context of {context}.")
    window = min(WINDOW, context - new_tokens) if window is None else window
    if not 1 <= window <= context - new_tokens:
        raise InputError(
            f"a window of {window} tokens and {new_tokens} new ones do not fit the model's context of {context}."
        )
    other = None
    if versus is not None or versus_model is not None:
        beside = engine
        if versus_model is not None:
            beside = options.load_engine(versus_model, options.DEFAULT_ROUTER, backend, dtype, device, None)
        other = Versus(beside, versus or router, other_rule or rule)
    for line in (options.headline(options.describe(engine), router), *engine.notes):
        tell(line)
    total, done = size(sources), 0
    with reading("Analysing") as progress:

        def read(count: int) -> None:
            nonlocal done
            done += count
            progress(done, total)

        analysis = run(
            engine,
            (router, rule),
            text_source(sources, engine.tokenizer, window, limit, read),
            folder / DATA,
            new_tokens=new_tokens,
            versus=other,
            seed=seed,
        )
    summary = summarise(analysis, engine.tokenizer.decode)
    write_whole(folder / SUMMARY, json_format.dumps(summary, allow_nan=False, indent=1) + "\n")
    written = [folder / DATA, folder / SUMMARY]
    try:
        if figures:
            from minimoe.analysis.figures import draw

            written += draw(analysis, summary, folder)
    except InputError as error:  # the analysis is worth having without them
        tell(f"No figures were drawn: {error} Then give the same command again; the analysis itself is kept.")
    if json:
        write_json(summary)
    else:
        write(tables(summary, adjacent=adjacent))
    tell(f"written to {folder}: {', '.join(path.name for path in written)}")


def tables(summary: dict[str, Any], *, adjacent: bool = False) -> str:
    """What an analysis found, for people."""
    records, about = summary["records"], summary["about"]
    layers = [r for r in records if r["domain"] == r["phase"] == ALL]
    parts = [
        f"## {about['rule']} on {about['model']}: {summary['tokens']} tokens, {summary['curves']} router curves\n",
        _elbow_table(layers),
        "95 % intervals are over windows. Null: the elbow rule on Gaussian logits of the same spread.\n",
        "## Load, against top-k on the same logits\n",
        _load_table([r for r in layers if r["layer"] != ALL]),
    ]
    apart = [r for r in records if r["layer"] == ALL and (r["domain"] != ALL or r["phase"] != ALL)]
    if len({(r["domain"], r["phase"]) for r in apart}) > 2:
        parts += ["## Domains and phases\n", _domain_table(apart)]
    parts += ["## What experts are for\n", _expert_table(summary, adjacent)]
    return "\n".join(parts)


def _elbow_table(records: list[dict[str, Any]]) -> str:
    heads = ["layer", "mean k", "95 %", "null k", "elbow", "angle", "95 %", "null", "sharp", "null", "spread"]
    with_other = any("saturation" in record for record in records)
    heads += ["chosen alike"] if with_other else []
    rows = []
    for r in records:
        row = [str(r["layer"]), _number(r["k"], ".2f"), _range(r, "k", ".2f"), _number(r["null_k"], ".2f")]
        row += [_number(r["elbow"] and r["elbow"] + 1, ".1f"), _number(r["angle"], ".0f"), _range(r, "angle", ".0f")]
        row += [_number(r["null_angle"], ".0f"), _number(r["sharp"], ".1%"), _number(r["null_sharp"], ".1%")]
        row += [_number(r["spread"], ".2f")] + ([_number(r.get("saturation"), ".1%")] if with_other else [])
        rows.append(row)
    return markdown(heads, rows)


def _load_table(records: list[dict[str, Any]]) -> str:
    heads = ["layer", "CV", "top-k", "entropy", "top-k", "largest", "least", "dead", "moved", "at most"]
    rows = []
    for r in records:
        row = [str(r["layer"])]
        row += [_number(r[f"{p}load_{name}"], ".3f") for name in ("cv", "entropy") for p in ("", "top_")]
        row += [_number(r["load_largest"], ".2f"), _number(r["load_least"], ".2f"), str(r["load_dead"])]
        rows.append([*row, _number(r.get("l1"), ".4f"), _number(r.get("l1_bound"), ".4f")])
    return markdown(heads, rows)


def _domain_table(records: list[dict[str, Any]]) -> str:
    heads = ["domain", "phase", "curves", "mean k", "95 %", "elbow", "angle", "sharp"]
    rows = []
    for r in records:
        row = [r["domain"], r["phase"], str(r["curves"]), _number(r["k"], ".2f"), _range(r, "k", ".2f")]
        row += [_number(r["elbow"] and r["elbow"] + 1, ".1f"), _number(r["angle"], ".0f"), _number(r["sharp"], ".1%")]
        rows.append(row)
    return markdown(heads, rows, text_columns=2)


def _expert_table(summary: dict[str, Any], adjacent: bool) -> str:
    """By layer: what tells most about tokens and domains, the closest pair, and the most telling experts."""
    heads = ["layer", "bits on the domain", "favourite's share", "closest pair", "experts and their tokens"]
    rows = []
    for layer, domains in zip(summary["layers"], summary["domains"], strict=True):
        pairs = layer["coactivation_adjacent" if adjacent else "coactivation"]
        closest = f"{pairs[0]['expert']} with {pairs[0]['with']}: {pairs[0]['share']:.0%}" if pairs else "-"
        telling = sorted((e for e in layer["experts"] if e["tokens"]), key=_clarity, reverse=True)[:3]
        told = "; ".join(f"{e['expert']}: {' '.join(_word(w['text']) for w in e['tokens'][:5])}" for e in telling)
        row = [str(layer["layer"]), _number(domains["information"], ".3f"), _number(layer["vocabulary"], ".0%")]
        rows.append([*row, closest, told or "-"])
    return markdown(heads, rows)


def _clarity(expert: dict[str, Any]) -> float:
    """How much of their uses an expert's five favourite tokens give it."""
    return float(sum(word["share"] for word in expert["tokens"][:5]))


def _word(text: str) -> str:
    """A token as it can stand in a table."""
    return repr(text)[1:-1].strip().replace("|", "\\|") or "␣"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _range(record: dict[str, Any], name: str, form: str) -> str:
    low, high = record[f"{name}_low"], record[f"{name}_high"]
    return "-" if low is None else f"{low:{form}} to {high:{form}}"
