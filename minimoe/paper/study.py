"""Everything that is measured for the report, part by part; a finished part is kept, and a cut-off one goes on."""

from __future__ import annotations

import hashlib
import json
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
from minimoe.evaluate.letters import NEW_TOKENS, Letters
from minimoe.evaluate.log import Log
from minimoe.evaluate.results import results
from minimoe.evaluate.run import Benchmark, evaluate, left, settings
from minimoe.journal import Journal
from minimoe.paper.benchmarks import Benchmarks, by_subject
from minimoe.paper.measures import STEPS, Masked, block_latency, padding, sample_curves, within_reach
from minimoe.routers import Router
from minimoe.routers.elbow import Elbow
from minimoe.routers.mixed_k import MixedK
from minimoe.routers.random_head import RandomHead
from minimoe.routers.random_tail import RandomTail
from minimoe.routers.top_k import TopK
from minimoe.whole_file import write_whole

QUICK_ROUNDS, ROUNDS = 5, 20  # of timing
QUICK_BATCH, BATCH = 4, 20  # prompts side by side in it; the paper's program has 20
TOP, MASKED, SKIPPED, SAME_K = (
    "top-k",
    "elbow, pruned experts computed",
    "elbow, pruned experts skipped",
    "top-k at elbow's mean k",
)
NEW = NEW_TOKENS - 1  # decode passes after a prompt: the last token that is written is not run

Part = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Progress:
    """Called as work goes on: what is done, then how many steps of how many."""

    told: Callable[[str], None] = lambda what: None
    ran: Callable[[int, int], None] = lambda done, total: None


class Study:
    """The measurements for one checkpoint on one set of benchmarks.

    Args:
        out: where parts are kept.
        quick: few rounds of timing, noted in the report. (The benchmarks say how many items there are.)

    Raises:
        InputError: an `out` that holds another study.
    """

    def __init__(self, engine: Engine, benchmarks: Benchmarks, out: Path, *, quick: bool, seed: int = 0) -> None:
        self.engine, self.benchmarks, self.quick, self.seed = engine, benchmarks, quick, seed
        self.rounds, self.batch = (QUICK_ROUNDS, QUICK_BATCH) if quick else (ROUNDS, BATCH)
        self.parts = out / "parts"
        self.scored = [*benchmarks.letters, *benchmarks.cloze]
        items = [item.digest() for benchmark in self.scored for item in benchmark.items]
        self.about: Part = {
            "model": engine.name,
            **settings(engine, seed),
            "quick": quick,
            "items": {benchmark.task.name: len(benchmark.items) for benchmark in benchmarks.letters},
            "tasks": {benchmark.task.name: benchmark.task.title for benchmark in benchmarks.letters},
            "groups": dict(benchmarks.titles),
            "subjects": benchmarks.subjects,
        }
        known = [{k: v for k, v in self.about.items() if k != "model"}, items]
        self.identity = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]
        for path in sorted(self.parts.glob("*.json")):
            if read_part(path, self.identity) is None:
                raise InputError(f"{path} is of another study; name another --out, or remove that folder.")

    def run(self, progress: Progress) -> Part:
        """All parts: about, and each of `makers`."""
        self.parts.mkdir(parents=True, exist_ok=True)
        found: Part = {"about": self.about}
        for name, (what, make) in self.makers.items():
            path = self.parts / f"{name}.json"
            kept = read_part(path, self.identity)
            if kept is None:
                progress.told(what)
                kept = make(found, progress)
                document = {"identity": self.identity, "data": kept}
                write_whole(path, json.dumps(document, allow_nan=False) + "\n")
                path.with_suffix(".jsonl").unlink(missing_ok=True)
            found[name] = kept
        return found

    @property
    def makers(self) -> dict[str, tuple[str, Callable[[Part, Progress], Part]]]:
        """By part: what a person is told, and what makes it of the parts before it."""
        return {
            "samples": ("sample curves", self._samples),
            "prompts": ("prompts", self._prompts),
            "routers": ("routers on all prompts", self._routers),
            "subjects": ("routers by subject", self._subjects),
            "latency": ("latency of MoE blocks", self._latency),
            "scores": ("answers", self._scores),
        }

    def left(self) -> list[str]:
        """Names of the parts that are not there yet."""
        return [name for name in self.makers if not (self.parts / f"{name}.json").exists()]

    def _samples(self, found: Part, progress: Progress) -> Part:
        """Sorted curves of the prompt in the middle of every group."""
        curves = {}
        middle = {name: [part[len(part) // 2]] for name, part in self.benchmarks.groups.items()}
        for name, (ids,) in self.prompts(middle).items():
            layers = sample_curves(self.engine, ids)
            curves[name] = [[[float(f"{p:.6g}") for p in curve] for curve in layer.tolist()] for layer in layers]
        return {"curves": curves}

    def _prompts(self, found: Part, progress: Progress) -> Part:
        """What needs no model: padding, and what the paper's parser can read."""
        prompts = self.prompts(self.benchmarks.groups)
        return {
            "padding": {name: padding(list(map(len, part))) for name, part in prompts.items()},
            "reach": {b.task.name: within_reach(b.items) for b in self.benchmarks.letters},  # type: ignore[arg-type]
        }

    def prompts(self, groups: Mapping[str, Sequence[Any]]) -> dict[str, list[list[int]]]:
        """Token ids of prompts in the paper's protocol, by group."""
        sources = {name: prompt_source(self.engine, {name: part}) for name, part in groups.items()}
        return {name: [ids for _, ids in source.sequences()] for name, source in sources.items()}

    def _routers(self, found: Part, progress: Progress) -> Part:
        return self.analyse(self.parts / "routers.npz", self.benchmarks.groups, NEW, progress)

    def _subjects(self, found: Part, progress: Progress) -> Part:
        groups = self.subject_groups()
        if groups is None:
            return dict(found["routers"])
        return self.analyse(self.parts / "subjects.npz", groups, 0, progress)

    def subject_groups(self) -> dict[str, list[Any]] | None:
        """Prompts of the task whose subjects are compared, by subject; None where these are the groups anyway."""
        (task,) = (b for b in self.benchmarks.letters if b.task.name == self.benchmarks.subjects)
        groups = by_subject(task.items)
        return None if list(groups) == list(self.benchmarks.groups) else groups

    def analyse(self, path: Path, groups: Mapping[str, Sequence[Any]], new_tokens: int, progress: Progress) -> Part:
        """The summary of an analysis under the elbow rule, with each group of prompts as a domain."""
        source = prompt_source(self.engine, groups)
        total, done = sum(len(ids) for _, ids in source.sequences()), 0

        def ran(tokens: int) -> None:
            nonlocal done
            done += tokens
            progress.ran(done, total)

        analysis = analyze(
            self.engine, ("elbow", Elbow()), source, path, new_tokens=new_tokens, seed=self.seed, ran=ran
        )
        summary = summarise(analysis, self.engine.tokenizer.decode)
        return {key: summary[key] for key in ("tokens", "curves", "records", "variance")}

    def arms(self, k: float) -> dict[str, Router]:
        """The rules whose time is taken; k is the elbow rule's mean."""
        return {TOP: TopK(), MASKED: Masked(), SKIPPED: Elbow(), SAME_K: MixedK(k=k)}

    def _latency(self, found: Part, progress: Progress) -> Part:
        arms, prompts = self.arms(mean_k(found)), self.prompts(self.benchmarks.groups)
        journal = Journal(self.parts / "latency.jsonl", self.identity)
        records = block_latency(self.engine, arms, prompts, self.rounds, self.batch, self.seed, journal, progress.ran)
        journal.close()
        about = {"rounds": self.rounds, "batch": self.batch, "steps": STEPS, "threads": torch.get_num_threads()}
        return {**about, "records": records}

    def rules(self, k: float) -> list[tuple[list[Benchmark], dict[str, Router]]]:
        """Which rules run on which benchmarks; k is the elbow rule's mean."""
        everywhere: dict[str, Router] = {"top_k": TopK(), "elbow": Elbow(), "mixed_k": MixedK(k=k)}
        replaced: dict[str, Router] = {"random_tail": RandomTail(), "random_head": RandomHead()}
        return [
            (self.scored, everywhere),
            ([b for b in self.scored if b.task.name == self.benchmarks.subjects], replaced),
        ]

    def log(self, found: Part) -> Log:
        """Where answers are kept as they come."""
        return Log(self.parts / "answers.jsonl", {**settings(self.engine, self.seed), "mean_k": mean_k(found)})

    def _scores(self, found: Part, progress: Progress) -> Part:
        layers = self.engine.config.num_layers
        records: list[Part] = []
        with self.log(found) as log:
            work = self.rules(mean_k(found))
            total = sum(left(benchmarks, rules, log) for benchmarks, rules in work)
            done = 0

            def ran(benchmark: Benchmark, rule: str, characters: int) -> None:
                nonlocal done
                done += characters
                progress.ran(done, total)

            for benchmarks, rules in work:
                evaluate(self.engine, benchmarks, rules, log, seed=self.seed, ran=ran)
            for benchmark in self.scored:
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


def read_part(path: Path, identity: str) -> Part | None:
    """A part that was made before for this very study."""
    try:
        kept = json.loads(path.read_text("utf-8"))
        return kept["data"] if kept["identity"] == identity else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
