"""Everything that is measured for the report, part by part; a finished part is kept, and a cut-off one goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
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
from minimoe.evaluate.run import Benchmark, decides_alone, evaluate, left, prepare, settings
from minimoe.evaluate.tasks import TASKS
from minimoe.model import Batch
from minimoe.paper.measures import STEPS, Masked, block_latency, sample_curves
from minimoe.profiler import timed
from minimoe.routers import Router
from minimoe.routers.elbow import Elbow
from minimoe.routers.mixed_k import MixedK
from minimoe.routers.random_head import RandomHead
from minimoe.routers.random_tail import RandomTail
from minimoe.routers.top_k import TopK
from minimoe.whole_file import write_whole

QUICK_ITEMS, QUICK_PER_SUBJECT = 12, 1
QUICK_ROUNDS, ROUNDS = 5, 30
DRAWING = 5.0  # seconds, for the summaries and the report
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
                document = {"identity": self.identity, "data": kept}
                write_whole(path, json.dumps(document, allow_nan=False) + "\n")
            found[name] = kept
        return found

    def seconds(self) -> float:
        """About how long what is not yet done will take; 0 if nothing is left.

        From the speed of a pass over many prompts, and the time of one that has a pass to itself, as rules that draw
        give to every continuation, and as decoding does.
        """
        prompts = [ids for _, ids in prompt_source(self.engine, {"": self.letters[0].items[:8]}).sequences()]
        together = self._timed([i for ids in prompts for i in ids][:512])
        lone = self._timed(prompts[0])
        each = together / min(sum(map(len, prompts)), 512)
        characters = len(self.engine.tokenizer.decode(prompts[0])) / len(prompts[0])  # of a token
        rounds = QUICK_ROUNDS if self.quick else ROUNDS
        work = {
            "samples": 0.0,
            "routers": each * sum(item.characters for b in self.letters for item in b.items) / characters,
            "subjects": each * sum(item.characters for item in self._mmlu.items) / characters,
            "latency": lone * (rounds + 1) * 4 * (1 + STEPS),
            "scores": 0.0,
        }
        for benchmarks, rules in self._rules(1.0):
            for benchmark, rule in product(benchmarks, rules.values()):
                if decides_alone(self.engine, rule):
                    work["scores"] += each * sum(item.characters for item in benchmark.items) / characters
                else:
                    passes = 1 + NEW if benchmark.protocol == "letters" else benchmark.items[0].choices
                    work["scores"] += lone * passes * len(benchmark.items)
        left = [cost for name, cost in work.items() if not (self.parts / f"{name}.json").exists()]
        return sum(left) + DRAWING if left else 0.0

    def _timed(self, ids: Sequence[int]) -> float:
        """Seconds of a pass over some tokens."""
        batch = Batch(torch.tensor(ids, device=self.engine.model.device), [len(ids)])

        def run() -> Any:
            with torch.inference_mode():
                return self.engine.model.forward(batch, TopK())

        run()
        return timed(run, self.engine.model.device)[1]

    @property
    def _mmlu(self) -> Benchmark:
        return next(benchmark for benchmark in self.letters if benchmark.task.name == "mmlu")

    def _samples(self, found: Part, progress: Progress) -> Part:
        """Sorted curves of the prompt in the middle of every benchmark."""
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
        return {key: summary[key] for key in ("tokens", "curves", "records", "variance")}

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

    def _rules(self, k: float) -> list[tuple[list[Benchmark], dict[str, Router]]]:
        """Which rules run on which benchmarks; k is the elbow rule's mean."""
        everywhere: dict[str, Router] = {
            "top_k": TopK(),
            "elbow": Elbow(),
            "mixed_k": MixedK(k=k),
        }
        replaced: dict[str, Router] = {"random_tail": RandomTail(), "random_head": RandomHead()}
        mmlu = [b for b in (*self.letters, *self.cloze) if b.task.name == "mmlu"]
        return [([*self.letters, *self.cloze], everywhere), (mmlu, replaced)]

    def _scores(self, found: Part, progress: Progress) -> Part:
        layers = self.engine.config.num_layers
        log_settings = {**settings(self.engine, self.seed), "mean_k": mean_k(found)}
        records: list[Part] = []
        with Log(self.parts / "answers.jsonl", log_settings) as log:
            work = self._rules(mean_k(found))
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
