"""Everything that is measured for the report, part by part; a finished part is kept, and a cut-off one goes on."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minimoe.analysis.run import analyze
from minimoe.analysis.summary import ALL, summarise
from minimoe.analysis.texts import Source
from minimoe.engine import Engine
from minimoe.errors import InputError
from minimoe.evaluate.letters import NEW_TOKENS, LetterPrompt, Letters
from minimoe.evaluate.log import Log
from minimoe.evaluate.results import results
from minimoe.evaluate.run import Benchmark, evaluate, left, prepare, settings
from minimoe.evaluate.tasks import TASKS
from minimoe.model import Batch
from minimoe.paper.measures import Masked, block_latency, sample_curves
from minimoe.routers import Router
from minimoe.routers.elbow import Elbow
from minimoe.routers.mixed_k import MixedK
from minimoe.routers.random_head import RandomHead
from minimoe.routers.random_tail import RandomTail
from minimoe.routers.top_k import TopK

QUICK_ITEMS, QUICK_PER_SUBJECT = 12, 1
QUICK_ROUNDS, ROUNDS = 5, 30
NEW = NEW_TOKENS - 1  # decode passes after a prompt: the last token that is written is not run

Part = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Progress:
    """Called as work goes on: what is done, then how many tokens of how many."""

    told: Callable[[str], None] = lambda what: None
    ran: Callable[[int, int], None] = lambda done, total: None


class Study:
    """The measurements for one checkpoint on one folder of benchmarks.

    Args:
        data: a folder with the six benchmarks, see minimoe.evaluate.
        out: where parts are kept.
        quick: a few items of each benchmark, and few rounds of timing.

    Raises:
        InputError: data that is missing or broken, or an `out` that holds another study.
    """

    def __init__(self, engine: Engine, data: Path, out: Path, *, quick: bool, seed: int = 0) -> None:
        self.engine, self.quick, self.seed = engine, quick, seed
        self.parts = out / "parts"
        self.letters = [self._prepare(name, data, letters=True) for name in TASKS]
        self.cloze = [self._prepare(name, data, letters=False) for name in TASKS]
        items = [item.digest() for benchmark in (*self.letters, *self.cloze) for item in benchmark.items]
        self.about: Part = {
            "model": engine.name,
            **settings(engine, seed),
            "quick": quick,
            "items": {benchmark.task.name: len(benchmark.items) for benchmark in self.letters},
        }
        known = [{k: v for k, v in self.about.items() if k != "model"}, items]
        self.identity = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]
        for path in sorted(self.parts.glob("*.json")):
            if _read(path, self.identity) is None:
                raise InputError(f"{path} is of another study; name another --out, or remove that folder.")

    def _prepare(self, name: str, data: Path, *, letters: bool) -> Benchmark:
        limit = (QUICK_PER_SUBJECT if name == "mmlu" else QUICK_ITEMS) if self.quick else None
        return prepare(TASKS[name], data, protocol="letters" if letters else "cloze", limit=limit)

    def run(self, progress: Progress) -> Part:
        """All parts: about, samples, routers, subjects, latency, scores."""
        self.parts.mkdir(parents=True, exist_ok=True)
        found: Part = {"about": self.about}
        for name, what, make in (
            ("samples", "sample curves", self._samples),
            ("routers", "routers on the prompts of all benchmarks", self._routers),
            ("subjects", "routers on MMLU by subject", self._subjects),
            ("latency", "latency of MoE blocks", self._latency),
            ("scores", "answers", self._scores),
        ):
            path = self.parts / f"{name}.json"
            kept = _read(path, self.identity)
            if kept is None:
                progress.told(what)
                kept = make(found, progress)
                _write(path, {"identity": self.identity, "data": kept})
            found[name] = kept
        return found

    def seconds(self) -> float:
        """About how long what is not yet done will take, from the speed of a pass over some prompts."""
        some = prompt_source(self.engine, {"": self.letters[0].items[:8]})
        ids = [i for _, prompt in some.sequences() for i in prompt][:512]
        characters = len(self.engine.tokenizer.decode(ids))
        batch = Batch(torch.tensor(ids, device=self.engine.model.device), [len(ids)])
        with torch.inference_mode():
            self.engine.model.forward(batch, TopK())
            start = time.perf_counter()
            self.engine.model.forward(batch, TopK())
            speed = (time.perf_counter() - start) / characters
        work = {
            "routers": sum(item.characters for b in self.letters for item in b.items),
            "subjects": sum(item.characters for item in self._mmlu.items),
            "scores": self._characters(),
        }
        return speed * sum(size for name, size in work.items() if not (self.parts / f"{name}.json").exists())

    @property
    def _mmlu(self) -> Benchmark:
        return next(benchmark for benchmark in self.letters if benchmark.task.name == "mmlu")

    def _samples(self, found: Part, progress: Progress) -> Part:
        """Sorted curves from the middle of every benchmark in turn, and what three readings of the rule say of each."""
        method = Letters(self.engine)
        prompts = [b.items[len(b.items) // 2] for b in self.letters]
        fitted = [method.fit(prompt) for prompt in prompts if isinstance(prompt, LetterPrompt)]
        curves = sample_curves(self.engine, [part.ids[:32] for part in fitted if part is not None])
        return {"curves": [[[float(f"{p:.6g}") for p in curve] for curve in layer.tolist()] for layer in curves]}

    def _routers(self, found: Part, progress: Progress) -> Part:
        groups = {b.task.name: list(b.items) for b in self.letters}
        return self._analyse("routers", groups, NEW, progress)

    def _subjects(self, found: Part, progress: Progress) -> Part:
        groups: dict[str, list[Any]] = {}
        for item in self._mmlu.items:
            groups.setdefault(item.subject, []).append(item)
        return self._analyse("subjects", groups, 0, progress)

    def _analyse(self, name: str, groups: dict[str, list[Any]], new_tokens: int, progress: Progress) -> Part:
        """The summary of an analysis under the elbow rule, with each group of prompts as a domain."""
        source = prompt_source(self.engine, groups)
        total, done = sum(len(ids) for _, ids in source.sequences()), 0

        def ran(tokens: int) -> None:
            nonlocal done
            done += tokens
            progress.ran(done, total)

        path = self.parts / f"{name}.npz"
        analysis = analyze(
            self.engine, ("elbow", Elbow()), source, path, new_tokens=new_tokens, seed=self.seed, ran=ran
        )
        summary = summarise(analysis, self.engine.tokenizer.decode)
        k_FJ = analysis.arrays["k_GFLJ"].sum((0, 2))
        kept = {key: summary[key] for key in ("tokens", "curves", "records", "variance")}
        return {**kept, "k": {phase: k_FJ[f].tolist() for f, phase in enumerate(analysis.about["phases"])}}

    def _latency(self, found: Part, progress: Progress) -> Part:
        arms: dict[str, Router] = {
            "top-k": TopK(),
            "elbow, pruned experts computed": Masked(),
            "elbow, pruned experts skipped": Elbow(),
            "top-k at elbow's mean k": MixedK(k=mean_k(found)),
        }
        rounds = QUICK_ROUNDS if self.quick else ROUNDS
        records = block_latency(self.engine, arms, rounds, self.seed)
        return {"rounds": rounds, "threads": torch.get_num_threads(), "records": records}

    def _rules(self, found: Part) -> list[tuple[list[Benchmark], dict[str, Router]]]:
        """Which rules run on which benchmarks."""
        everywhere: dict[str, Router] = {
            "top_k": TopK(),
            "elbow": Elbow(),
            "mixed_k": MixedK(k=mean_k(found)),
        }
        replaced: dict[str, Router] = {"random_tail": RandomTail(), "random_head": RandomHead()}
        mmlu = [b for b in (*self.letters, *self.cloze) if b.task.name == "mmlu"]
        return [([*self.letters, *self.cloze], everywhere), (mmlu, replaced)]

    def _characters(self) -> int:
        """Of all prompts that `_scores` runs, each as often as there are rules."""
        guess: Part = {"routers": {"records": [{"domain": ALL, "phase": ALL, "layer": ALL, "k": 1.0}]}}
        with Log(None, {}) as empty:
            return sum(left(benchmarks, rules, empty) for benchmarks, rules in self._rules(guess))

    def _scores(self, found: Part, progress: Progress) -> Part:
        layers = self.engine.config.num_layers
        log_settings = {**settings(self.engine, self.seed), "mean_k": mean_k(found)}
        records: list[Part] = []
        with Log(self.parts / "answers.jsonl", log_settings) as log:
            work = self._rules(found)
            total = sum(left(benchmarks, rules, log) for benchmarks, rules in work)
            done = 0

            def ran(benchmark: Benchmark, rule: str, characters: int) -> None:
                nonlocal done
                done += characters
                progress.ran(done, total)

            for benchmarks, rules in work:
                evaluate(self.engine, benchmarks, rules, log, seed=self.seed, ran=ran)
            for benchmark in (*self.letters, *self.cloze):
                names = [name for benchmarks, rules in work if benchmark in benchmarks for name in rules]
                parser = benchmark.protocol == "letters"
                records += results([benchmark], names, log, layers, published_parser=parser)
        return {"records": records}


def mean_k(found: Part) -> float:
    """The elbow rule's mean k over all prompts, layers and phases."""
    records = found["routers"]["records"]
    return float(next(r["k"] for r in records if r["domain"] == r["phase"] == r["layer"] == ALL))


def prompt_source(engine: Engine, groups: Mapping[str, Sequence[Any]]) -> Source:
    """Prompts of the letter protocol as sequences, each group a domain."""
    method = Letters(engine)

    def sequences() -> Iterator[tuple[int, list[int]]]:
        for domain, items in enumerate(groups.values()):
            for item in items:
                fitted = method.fit(item)
                if fitted is not None and fitted.ids:
                    yield domain, fitted.ids

    digests: Sequence[Any] = [[name, [item.digest() for item in items]] for name, items in groups.items()]
    digest = hashlib.sha256(json.dumps(digests).encode()).hexdigest()
    return Source(list(groups), {"prompts": sum(map(len, groups.values()))}, digest, sequences)


def _read(path: Path, identity: str) -> Part | None:
    """A part that was made before for this very study."""
    try:
        kept = json.loads(path.read_text("utf-8"))
        return kept["data"] if kept["identity"] == identity else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, content: Part) -> None:
    """Written beside and moved over, so that a kill leaves no half of one."""
    fresh = Path(f"{path}.new")
    fresh.write_text(json.dumps(content, allow_nan=False) + "\n", "utf-8")
    os.replace(fresh, path)
