"""`minimoe routers`: which routing rules there are, and what one of them does to a curve."""

from __future__ import annotations

import inspect
import math
import re
import sys
import types
import typing
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minimoe.cli.options import Json
from minimoe.cli.terminal import on, write, write_json
from minimoe.errors import InputError

if TYPE_CHECKING:
    from minimoe.routers import Router

EXAMPLE_SEED = 12  # a typical draw: neither flat nor with one expert far above all others
EXAMPLE_EXPERTS, EXAMPLE_TOP_K = 64, 8  # those of OLMoE
EXAMPLE_SIGMAS = {"a router that is in doubt": 1.5, "a router that is sure": 4.0}


def routers(
    name: Annotated[
        str | None, typer.Argument(metavar="SPEC", help="Show one rule in detail, and draw what it keeps.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Write all rules as the page ROUTERS.md.")] = False,
    json: Json = False,
) -> None:
    """List the routing rules, or show one of them at work."""
    from minimoe.routers import ROUTERS

    if markdown:
        if name is not None or json:
            raise InputError("--markdown writes the page of all rules; give it alone.")
        write("".join(_page({key: _description(rule) for key, rule in ROUTERS.items()})))
        return

    if name is None:
        descriptions = [{"name": key, **_description(rule)} for key, rule in ROUTERS.items()]
        if json:
            write_json({"routers": descriptions})
        for description in descriptions if not json else ():
            _print_rule(description, keys_in_full=False)
        return
    from minimoe.cli.own_rule import OwnRule, read_router

    spec = example_spec(name)
    if spec is None:
        description, examples = {"name": name, **_description(ROUTERS[name.replace("-", "_")])}, []
    else:
        router = read_router(spec)
        rule = router.rule if isinstance(router, OwnRule) else router
        description = {"name": spec, **_description(type(rule))}
        examples = [{"label": label, **_example(router, sigma)} for label, sigma in EXAMPLE_SIGMAS.items()]
    if json:
        write_json({**description, "examples": examples})
        return
    _print_rule(description, keys_in_full=True)
    _print_examples(examples)


def _page(descriptions: dict[str, dict[str, Any]]) -> Iterator[str]:
    """ROUTERS.md, piece by piece: each rule in its own words, with its keys and what it keeps of one curve."""
    from minimoe.cli.own_rule import read_router
    from minimoe.cli.pictures import curve

    label, sigma = next(iter(EXAMPLE_SIGMAS.items()))
    yield (
        "# Routing rules\n\n"
        "Written by `python -m minimoe routers --markdown`, from the rules' own docstrings; a test compares the two.\n"
        f"p_1 to p_N are a token's probabilities in descending order, K is the model's own top-k. Each picture is what "
        f"the rule keeps (#) for {label}: {EXAMPLE_EXPERTS} Gaussian logits of standard deviation {sigma}, K = "
        f"{EXAMPLE_TOP_K}.\n"
    )
    for key, about in descriptions.items():
        yield f"\n## {key}\n\n{about['summary']}\n\n- Formula: `{about['formula']}`\n- Source: {about['source']}\n"
        yield f"- Looks at {_looks(about['sees'])}. Needs {about['needs']}.\n"
        for entry in about["keys"]:
            default = "" if entry["default"] is None else f", default {entry['default']}"
            yield f"- `{entry['name']}` ({entry['type']}{default}): {entry['help']}\n"
        spec = example_spec(key)
        if spec is not None:
            example = _example(read_router(spec), sigma)
            picture = curve(example["probabilities"], example["kept"]).plain
            lines = "\n".join(line.rstrip() for line in picture.splitlines())
            yield f"\n`{spec}`\n\n```\n{lines}\n```\n"


def _looks(sees: str) -> str:
    return "the token itself alone" if sees == "itself" else sees


def example_spec(spec: str) -> str | None:
    """A SPEC that can be drawn: a rule's bare name gets the keys of its example; None if nothing can be drawn."""
    from minimoe.routers import ROUTERS

    rule = ROUTERS.get(spec.strip().replace("-", "_"))
    if rule is None or rule.needs != "a recording":
        return f"{spec}:{rule.example}" if rule is not None and rule.example else spec
    return None


def _description(rule: type[Any]) -> dict[str, Any]:
    """What a rule's docstring and signature say: summary, formula, source, and its keys."""
    from minimoe.routers.spec import parameters

    # A dataclass without a docstring is given its signature for one.
    written = rule.__doc__ if isinstance(rule.__doc__, str) and not rule.__doc__.startswith(f"{rule.__name__}(") else ""
    text = inspect.cleandoc(written)
    prose = text.partition("\nAttributes:")[0]
    words = " ".join(prose.split())
    formula = re.search(r"Formula: (.*?)(?:\.? Source:|$)", words)
    source = re.search(r"Source: (.*)", words)
    helps = _attributes(rule)
    return {
        "summary": prose.partition("\n")[0],
        "formula": formula[1].rstrip(".") if formula else None,
        "source": source[1] if source else None,
        "sees": getattr(rule, "sees", "itself"),
        "needs": getattr(rule, "needs", "nothing"),
        "keys": [
            {
                "name": key,
                "type": _kind(parameter.annotation),
                "default": _plain(parameter.default),
                "help": helps.get(key, ""),
            }
            for key, parameter in parameters(rule).items()
        ],
    }


def _plain(default: Any) -> Any:
    """A default as JSON can hold it."""
    if default is inspect.Parameter.empty or default is None:
        return None
    plain = isinstance(default, (bool, int, str)) or (isinstance(default, float) and math.isfinite(default))
    return default if plain else repr(default)


def _attributes(rule: type[Any]) -> dict[str, str]:
    """The Attributes sections of a class and its bases, by attribute; the class itself has the last word."""
    found: dict[str, str] = {}
    for base in reversed(rule.__mro__):
        section = inspect.cleandoc(str(vars(base).get("__doc__") or "")).partition("Attributes:\n")[2]
        for entry in re.split(r"\n(?=    \w)", section.partition("\n\n")[0]):
            key, colon, help_text = " ".join(entry.split()).partition(": ")
            if colon:
                found[key] = help_text
    return found


def _kind(annotation: Any) -> str:
    """A type as a person would name it."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(map(str, typing.get_args(annotation)))
    names = {int: "whole number", float: "number", bool: "true or false"}
    return names.get(annotation, "text")


def _example(router: Router, sigma: float) -> dict[str, Any]:
    """What the rule does with 64 Gaussian logits, always the same ones but for their spread."""
    import torch

    from minimoe.routers import RouterContext, rank

    draws = torch.Generator().manual_seed(EXAMPLE_SEED)
    logits_TE = sigma * torch.randn(1, EXAMPLE_EXPERTS, generator=draws)
    zero_T = torch.zeros(1, dtype=torch.int64)
    context = RouterContext(
        layer=0,
        phase="prefill",
        ids_T=zero_T,
        positions_T=zero_T,
        sequence_T=zero_T,
        top_k=EXAMPLE_TOP_K,
        norm_topk_prob=False,
        generator=draws,
        num_layers=1,
    )
    routing = router.route(logits_TE, context)
    probs_TE, experts_TE = rank(logits_TE)
    k = int(routing.k_T[0])
    rank_of = {expert: place for place, expert in enumerate(experts_TE[0].tolist())}
    kept = sorted(rank_of[expert] for expert in routing.experts_TK[0, :k].tolist())
    probs = probs_TE[0].tolist()
    return {"sigma": sigma, "probabilities": probs, "kept": kept, "k": k, "mass": sum(probs[i] for i in kept)}


def _print_rule(description: dict[str, Any], keys_in_full: bool) -> None:
    from rich.text import Text

    def line(text: str, style: str = "") -> None:
        on(sys.stdout).print(Text(text, style), soft_wrap=True)

    line(description["name"], "bold")
    if description["summary"]:
        line(f"  {description['summary']}")
    if description["formula"]:
        line(f"  {description['formula']}")
    if description["source"] and keys_in_full:
        line(f"  Source: {description['source']}")
    if description["sees"] != "itself":
        line(f"  Looks at {description['sees']}.")
    if description["needs"] != "nothing":
        line(f"  Needs {description['needs']}.")
    for key in description["keys"] if keys_in_full else ():
        told = key["default"] is None or "default" in key["help"]
        default = "" if told else f", {key['default']} by default"
        line(f"  {key['name']} ({key['type']}{default}): {key['help']}")
    if not keys_in_full:
        keys = ", ".join(
            key["name"] + ("" if key["default"] is None else f"={key['default']}") for key in description["keys"]
        )
        line(f"  keys: {keys or 'none'}", "dim")


def _print_examples(examples: list[dict[str, Any]]) -> None:
    from minimoe.cli.pictures import curve

    for example in examples:
        out = on(sys.stdout)
        out.print()
        out.print(
            f"{example['label']}: sorted probabilities of {EXAMPLE_EXPERTS} experts, their logits Gaussian with "
            f"standard deviation {example['sigma']}",
            markup=False,
            soft_wrap=True,
        )
        out.print(curve(example["probabilities"], example["kept"]), soft_wrap=True)
        out.print(f"      they hold {example['mass']:.0%} of the probability", soft_wrap=True)
