"""One pass over a source: every sequence through the model, every routing into the tally, the state kept on the way.

Shape letters: T tokens, D hidden, B sequences of one pass.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minimoe.analysis.tally import ARRAYS, PHASES, Array, Overlap, Sizes, Tally, empty_arrays
from minimoe.analysis.texts import Source
from minimoe.cache import KVCache
from minimoe.engine import Engine
from minimoe.errors import InputError
from minimoe.model import Batch
from minimoe.packing import chunks
from minimoe.probe import Phase
from minimoe.routers import Router
from minimoe.routers.spec import hashes_of
from minimoe.snapshot import BROKEN, read_snapshot, write_snapshot
from minimoe.whole_file import replacing

PASS_TOKENS = 4096  # of one pass, as many windows as fit
SAVE_EVERY = 16  # passes
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Analysis:
    """What was counted, and on what.

    Attributes:
        about: plain data: format, model, checkpoint, rule, top_k, domains, phases, window, new_tokens, versus, seed,
            identity, and `arrays`, which says for each array what it counts.
        arrays: see minimoe.analysis.tally.ARRAYS.
    """

    about: dict[str, Any]
    arrays: dict[str, Array]


@dataclass(frozen=True, slots=True)
class Versus:
    """What the routing is compared with: another rule, another checkpoint, or both."""

    engine: Engine
    name: str
    router: Router


def analyze(
    engine: Engine,
    rule: tuple[str, Router],
    source: Source,
    path: str | Path,
    *,
    new_tokens: int = 0,
    versus: Versus | None = None,
    seed: int = 0,
    ran: Callable[[int], None] = lambda tokens: None,
) -> Analysis:
    """Count what the router of `engine` does under a rule, and write it to `path` (npz).

    What is done so far is kept in PATH.part until then: a run that was killed goes on where it last saved and ends with
    the same file, bit for bit (on the same machine). A finished file of this very work is read and not made again.

    Args:
        rule: the name that is noted, and the rule.
        source: what is read; each of its sequences is run from its start.
        new_tokens: so many tokens are written (greedily) after each sequence; they are the decode phase.
        ran: called with the number of tokens of the source that were run, or had been before, since the last call.

    Raises:
        InputError: a sequence that the model does not hold, a text that cannot be read, a file of other work at `path`,
            or another checkpoint of another shape.
        NumericalError: router logits that are not finite.
    """
    config = engine.config
    if versus is not None:
        _check_alike(engine, versus.engine)
    about: dict[str, Any] = {
        "format": FORMAT,
        "model": engine.name,
        "checkpoint": engine.model.fingerprint(),
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "backend": engine.backend,
        "rule": rule[0],
        "top_k": config.top_k,
        "domains": source.domains,
        "phases": list(PHASES),
        **source.about,
        "new_tokens": new_tokens,
        "seed": seed,
        "versus": None
        if versus is None
        else {"model": versus.engine.name, "checkpoint": versus.engine.model.fingerprint(), "rule": versus.name},
    }
    read = [hashes_of(name) for name in (rule[0], *([versus.name] if versus else []))]
    work = json.dumps([{key: value for key, value in about.items() if key != "model"}, source.digest, read])
    about["identity"] = hashlib.sha256(work.encode()).hexdigest()[:16]
    about["arrays"] = {name: meaning for name, (_, meaning) in ARRAYS.items()}
    if Path(path).exists():
        done = read_analysis(path)
        if done.about["identity"] != about["identity"]:
            raise InputError(f"{path} is another analysis; name another place, or remove it.")
        return done
    arrays = empty_arrays(Sizes(len(source.domains), config.num_layers, config.num_experts, config.vocab_size))
    part = Path(f"{path}.part")
    passed = read_snapshot(part, arrays, about["identity"])
    tally = Tally(arrays, config.top_k)
    with torch.inference_mode():
        for index, (domain, group) in enumerate(_groups(source.sequences())):
            _check_fits(engine, group, new_tokens)
            ran(sum(map(len, group)))
            if index < passed:  # counted before it was cut off
                continue
            tally.begin(domain)
            written = _walk(engine, rule[1], group, new_tokens, tally, seed + index)
            if versus is not None:
                overlap = Overlap(tally)
                _walk(versus.engine, versus.router, group, new_tokens, overlap, seed + index, written)
            tally.end()
            if (index + 1) % SAVE_EVERY == 0:
                write_snapshot(part, arrays, about["identity"], index + 1)
    analysis = Analysis(about, arrays)
    with replacing(path) as fresh, open(fresh, "wb") as file:
        content: dict[str, Any] = {"about": np.array(json.dumps(about)), **arrays}
        np.savez_compressed(file, **content)
    part.unlink(missing_ok=True)
    return analysis


def _groups(sequences: Iterable[tuple[int, list[int]]]) -> Iterator[tuple[int, list[list[int]]]]:
    """Domains and the sequences that run side by side."""
    for domain, pairs in groupby(sequences, key=itemgetter(0)):
        for group in chunks((ids for _, ids in pairs), len, PASS_TOKENS):
            yield domain, group


def _check_fits(engine: Engine, group: Sequence[Sequence[int]], new_tokens: int) -> None:
    longest = max(map(len, group))
    if longest + new_tokens > engine.config.max_positions:
        raise InputError(
            f"a sequence of {longest} tokens and {new_tokens} new ones do not fit the model's context of "
            f"{engine.config.max_positions}."
        )


def _walk(
    engine: Engine,
    router: Router,
    group: Sequence[Sequence[int]],
    new_tokens: int,
    probe: Tally | Overlap,
    seed: int,
    written: Sequence[list[int]] | None = None,
) -> list[list[int]]:
    """Run sequences side by side, then write new tokens after them, one a pass.

    Args:
        written: what to write, step by step, instead of the likeliest tokens.

    Returns:
        The token ids that were run at each step of decode.
    """
    model = engine.model
    draws = torch.Generator().manual_seed(seed)
    caches = None
    if new_tokens:
        rooms = [len(ids) + new_tokens for ids in group]
        caches = [KVCache(engine.config, room, model.dtype, model.device) for room in rooms]
    steps: list[list[int]] = []

    def run(ids: list[int], new: list[int], phase: Phase) -> torch.Tensor:
        ids_T = torch.tensor(ids, device=model.device)
        if isinstance(probe, Tally):
            probe.reads(ids_T)
        return model.forward(Batch(ids_T, new, caches, phase), router, probe, draws)

    lengths = [len(ids) for ids in group]
    hidden_TD = run([i for ids in group for i in ids], lengths, "prefill")
    last_B = torch.tensor(lengths).cumsum(0) - 1
    for step in range(new_tokens):
        if written is None:
            steps.append(model.head(hidden_TD[last_B]).argmax(-1).tolist())
        else:
            steps.append(written[step])
        hidden_TD = run(steps[-1], [1] * len(group), "decode")
        last_B = torch.arange(len(group))
    return steps


def _check_alike(first: Engine, second: Engine) -> None:
    """Refuse to compare routings that have not the same layers, experts and token ids."""
    a, b = first.config, second.config
    shapes = [(c.num_layers, c.num_experts, c.vocab_size, c.max_positions) for c in (a, b)]
    if shapes[0] != shapes[1]:
        raise InputError(
            f"{second.name} has {b.num_layers} layers of {b.num_experts} experts, a vocabulary of {b.vocab_size} and a "
            f"context of {b.max_positions}, and {first.name} has {a.num_layers} of {a.num_experts}, {a.vocab_size} and "
            f"{a.max_positions}; only checkpoints of one shape can be compared."
        )


def read_analysis(path: str | Path) -> Analysis:
    """Read what `analyze` wrote.

    Raises:
        InputError: no such file, or no whole analysis.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            analysis = Analysis(about, {name: file[name] for name in ARRAYS})
        if about["format"] != FORMAT or not isinstance(about["identity"], str):
            raise ValueError
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    except BROKEN:
        raise InputError(f"{path} is no analysis; make one with 'minimoe analyze'.") from None
    return analysis
