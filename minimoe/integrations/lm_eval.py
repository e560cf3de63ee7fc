"""lm-evaluation-harness: the engine as a model named `minimoe`, and the harness's own tasks over local files.

Importing this module registers the model. The standard tasks need the hub; `local_tasks` gives the harness the same
tasks, with its own prompts and metrics, over the files that `minimoe eval` reads:

    lm_eval.simple_evaluate("minimoe", "pretrained=tiny,router=elbow", local_tasks(["piqa"], "DIR"))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from minimoe.engine import Engine, load
from minimoe.errors import InputError
from minimoe.evaluate.questions import Question
from minimoe.evaluate.run import CHUNK, decides_alone
from minimoe.evaluate.tasks import Task, find_tasks, read_questions, read_shots
from minimoe.packing import Branch, chunks, room, score_alone, score_together

try:
    import datasets
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise InputError(f"lm-evaluation-harness is not there ({error}); pip install 'minimoe[eval]'.") from None


LOCAL = "local"


@register_model("minimoe")
class MinimoeLM(TemplateLM):
    """An engine as the harness wants it.

    Args:
        pretrained: as minimoe.load takes a model.
        router: a SPEC; rules with commas in them are given in a dict of arguments.
        dtype, backend, device: see minimoe.load.
        seed: of rules that draw.
        engine: a loaded one, instead of all the others.
        options: batch sizes that the harness passes on; batches have no padding here, so nothing depends on them.
    """

    def __init__(
        self,
        pretrained: str = "tiny",
        router: str = "top_k",
        dtype: str | None = None,
        backend: str | None = None,
        device: str | None = None,
        seed: int = 0,
        engine: Engine | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.engine = engine or load(pretrained, router=router, dtype=dtype, backend=backend, device=device or "cpu")
        self.seed = seed

    @property
    def eot_token_id(self) -> int:
        return self.engine.encode_prompt([])[0]

    @property
    def max_length(self) -> int:
        """Tokens that the model can be fed."""
        return self.engine.config.max_positions

    @property
    def tokenizer_name(self) -> str:
        return self.engine.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text."""
        return self.engine.tokenizer.encode(string)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of whole texts, in windows as long as the model's context."""
        totals = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(self.tok_encode(text), self.eot_token_id, self.max_length, 1)
            pairs = [("", *make_disjoint_window(window)) for window in windows]
            totals.append(sum(logprob for logprob, _ in self._loglikelihood_tokens(pairs)))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations, greedy unless the task says otherwise."""
        texts = []
        for request in requests:
            prompt, options = request.args
            new = int(options.get("max_gen_toks", 256))
            ids = self.tok_encode(prompt)[-max(1, self.max_length - new) :]
            stop = [text for text in _as_list(options.get("until")) if text]
            temperature = float(options.get("temperature", 0)) if options.get("do_sample") else 0
            stream = self.engine.stream(ids, max_new_tokens=new, stop=stop, temperature=temperature, seed=self.seed)
            texts.append("".join(stream))
        return texts

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """(log-probability, whether it is what greedy decoding would write) of each (texts, context, continuation)."""
        branches = [self._cut(context, ids) for _, context, ids in requests]
        # What follows the same context stands side by side in the harness's lists of requests.
        groups = [list(group) for _, group in groupby(branches, key=lambda branch: branch[0])]
        engine, router = self.engine, self.engine.router
        if decides_alone(engine, router):
            parts = chunks(groups, room, CHUNK)
            found = [group for part in parts for group in score_together(engine.model, router, part)]
        else:
            found = [score_alone(engine.model, router, group, None, self.seed) for group in groups]
        return [(score.logprob, score.greedy) for group in found for score in group.scores]

    def _cut(self, context: list[int], ids: list[int]) -> Branch:
        """The end of what is too long, as the harness cuts it: one token more than is fed, for the last is not."""
        ids = ids[-self.max_length :]
        return context[-(self.max_length + 1 - len(ids)) :], ids


def _as_list(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def local_tasks(names: Sequence[str], data: str | Path) -> list[dict[str, Any]]:
    """The harness's own tasks over local files, to be given to lm_eval.simple_evaluate; mmlu is all of its subjects.

    Args:
        names: of minimoe's tasks.
        data: a folder as `minimoe eval --data` takes it.

    Raises:
        InputError: an unknown task, or files that are not there or cannot be used.
    """
    found = []
    for task in find_tasks(names):
        questions = sorted(read_questions(task, Path(data)), key=lambda question: question.subject)
        # The set that is evaluated is the only one here, but for MMLU's worked examples.
        sets = {"training_split": None, "validation_split": None, "test_split": None, f"{task.split}_split": task.split}
        for subject, part in groupby(questions, key=lambda question: question.subject):
            name = f"{task.name}_{subject}" if subject else task.name
            found.append({"task": name, "custom_dataset": _dataset(task, list(part), subject, Path(data)), **sets})
    return [{"group": LOCAL, "task": found}]  # as members of a group, tasks keep all else that the harness says of them


def _dataset(task: Task, questions: Sequence[Question], subject: str, data: Path) -> Callable[..., Any]:
    row = ROWS.get(task.name, _arc)
    sets: dict[str, list[dict[str, Any]]] = {task.split: [row(question) for question in questions]}
    if subject:
        sets["dev"] = [row(question) for question in read_shots(task, data, 5, [subject])[subject]]
    return lambda **_: datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in sets.items()})


def _arc(question: Question) -> dict[str, Any]:
    choices = {"text": list(question.choices), "label": list(question.labels)}
    key = question.labels[question.gold]
    return {"id": question.id, "question": question.stem, "choices": choices, "answerKey": key}


def _mmlu(question: Question) -> dict[str, Any]:
    return {"question": question.stem, "choices": list(question.choices), "answer": question.gold}


def _hellaswag(question: Question) -> dict[str, Any]:
    activity, _, context = question.passage.partition(": ")
    parts = {"activity_label": activity, "ctx_a": context, "ctx_b": ""}
    return {**parts, "endings": list(question.choices), "label": str(question.gold)}


def _piqa(question: Question) -> dict[str, Any]:
    return {"goal": question.stem, "sol1": question.choices[0], "sol2": question.choices[1], "label": question.gold}


def _winogrande(question: Question) -> dict[str, Any]:
    first, second = question.choices
    return {"sentence": question.stem, "option1": first, "option2": second, "answer": str(question.gold + 1)}


# The hub's names of the fields, which the harness's tasks use; all others are as ARC's.
ROWS: dict[str, Callable[[Question], dict[str, Any]]] = {
    "mmlu": _mmlu,
    "hellaswag": _hellaswag,
    "piqa": _piqa,
    "winogrande": _winogrande,
}
