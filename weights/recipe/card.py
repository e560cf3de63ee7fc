"""Make a model folder's card, README.md, of the prose in card.md and the numbers in measured.json; draw the loss curve.

Run: python weights/recipe/card.py weights/tiny

Each `<!-- measured: NAME -->` in the prose gives way to a table. No number there is typed by hand, and a test compares
the card of the shipped model with its file.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Measured = Mapping[str, Any]

RULES = {
    "top_k": "top-8",
    "elbow": "elbow",
    "same_mean_k": "top-k at elbow's mean k",
    "random_tail": "top-8, tail after the elbow at random",
    "random_head": "top-8, head up to the elbow at random",
}
PROSE = Path(__file__).parent / "card.md"
PLACE = re.compile(r"<!-- measured: (\w+) -->\n")


def render(prose: str, measured: Measured) -> str:
    """The card: the prose with every table in its place."""
    return PLACE.sub(lambda place: SECTIONS[place[1]](measured), prose)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def interval(low_high: Sequence[float]) -> str:
    return f"{100 * low_high[0]:.1f} to {100 * low_high[1]:.1f}"


def layers(measured: Measured) -> list[str]:
    return [f"layer {layer}" for layer in range(len(measured["load"]["variation"]))]


def size(measured: Measured) -> str:
    parameters, run = measured["parameters"], measured["training"]
    return (
        f"{parameters['total'] / 1e6:.1f} million parameters, of which {parameters['active'] / 1e6:.1f} million are "
        f"used for a token (embedding rows apart). Trained for {run['steps']:,} steps on {run['tokens'] / 1e6:.1f} "
        f"million tokens, in {run['seconds'] / 60:.0f} minutes by the clock.\n"
    )


def held_out(measured: Measured) -> str:
    rows = [
        [
            name,
            f"{d['documents']:,}",
            f"{d['bytes']:,}",
            f"{d['bits_per_byte']:.3f}",
            f"{d['xz_bits_per_byte']:.3f}",
            percent(d["below_xz"]),
        ]
        for name, d in measured["domains"].items()
    ]
    return table(["domain", "documents", "bytes", "bits per byte", "`xz -9e`", "below xz"], rows)


def load(measured: Measured) -> str:
    values = zip(*(measured["load"][key] for key in ("least_share", "greatest_share", "variation")), strict=True)
    rows = [
        [str(layer), *(f"{value:.2f}" for value in row), percent(sharp)]
        for layer, (row, sharp) in enumerate(zip(values, measured["load"]["sharp"], strict=True))
    ]
    return table(["layer", "least used expert", "most used expert", "CV of the load", "sharp elbows"], rows)


def rules(measured: Measured) -> str:
    rows = []
    for key, name in RULES.items():
        rule = measured["rules"][key]
        mean_k = sum(rule["mean_k"]) / len(rule["mean_k"])
        stories, right = rule["domains"]["stories"], rule["right"] / rule["items"]
        rows.append(
            [
                name,
                f"{mean_k:.2f}",
                f"{rule['bits_per_byte']:.4f}",
                f"{stories['bits_per_byte']:.4f}",
                f"{percent(right)} ({interval(rule['interval'])})",
                f"{percent(stories['right'] / stories['items'])} ({interval(stories['interval'])})",
            ]
        )
    head = ["rule", "mean k", "bits per byte, all", "stories", "cloze accuracy, all", "stories"]
    return table(head, rows)


def cloze(measured: Measured) -> str:
    rows = [
        [name, str(d["items"]), percent(d["right"] / d["items"]), interval(d["interval"])]
        for name, d in measured["rules"]["top_k"]["domains"].items()
    ]
    return table(["domain", "items", "right", "95 % interval, %"], rows)


def k_by_layer(measured: Measured) -> str:
    elbow = measured["rules"]["elbow"]
    rows = [
        [name, f"{mean:.2f}", *(percent(part) for part in parts)]
        for name, mean, parts in zip(layers(measured), elbow["mean_k"], elbow["k"], strict=True)
    ]
    return table(["", "mean k", *(f"k = {k}" for k in range(1, len(elbow["k"][0]) + 1))], rows)


def k_by_domain(measured: Measured) -> str:
    rows = [
        [name, f"{sum(d['mean_k']) / len(d['mean_k']):.2f}", *(f"{mean:.2f}" for mean in d["mean_k"])]
        for name, d in measured["rules"]["elbow"]["domains"].items()
    ]
    return table(["domain", "mean k", *layers(measured)], rows)


def samples(measured: Measured) -> str:
    def quoted(text: str) -> str:
        return text.replace("\\", "\\\\").replace("*", "\\*").replace("_", "\\_").replace("<", "\\<")

    parts = []
    for sample in measured["samples"]:
        prompt = "**\n**".join(quoted(sample["prompt"]).rstrip("\n").split("\n"))
        text = f"**{prompt}**" + ("\n" if sample["prompt"].endswith("\n") else "") + quoted(sample["text"])
        parts.append("  \n".join(f"> {line}" for line in text.split("\n")) + "\n")
    return "\n".join(parts)


def files(measured: Measured) -> str:
    return table(["file", "SHA-256"], [[f"`{name}`", f"`{digest}`"] for name, digest in measured["files"].items()])


SECTIONS: Mapping[str, Callable[[Measured], str]] = {
    section.__name__: section
    for section in (size, held_out, load, rules, cloze, k_by_layer, k_by_domain, samples, files)
}


def draw_loss(measured: Measured, path: Path) -> None:
    """The training loss over the tokens, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = path.name
    from matplotlib import pyplot

    tokens, losses = zip(*measured["training"]["curve"], strict=True)
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    axes.plot([value / 1e6 for value in tokens], losses, linewidth=1.2)
    axes.set(xlabel="million training tokens", ylabel="cross entropy, nats a token", title="Training loss")
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def write_card(folder: Path) -> None:
    """Write README.md and loss.svg of a model folder from its measured.json."""
    measured = json.loads((folder / "measured.json").read_text("utf-8"))
    (folder / "README.md").write_text(render(PROSE.read_text("utf-8"), measured), "utf-8")
    draw_loss(measured, folder / "loss.svg")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    write_card(parser.parse_args(argv).folder)


if __name__ == "__main__":
    main()
