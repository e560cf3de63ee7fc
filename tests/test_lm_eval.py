"""lm-evaluation-harness through this engine and through transformers, on the embedded model and local files."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmark_files import write_benchmarks

import minimoe
from minimoe.engine import Engine
from minimoe.errors import InputError
from minimoe.hub import resolve

LITTLE = ["arc_easy", "piqa", "winogrande", "hellaswag"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_benchmarks(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def harness() -> Any:
    return pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return minimoe.load("tiny", dtype="float32")


def evaluated(harness: Any, model: Any, data: Path, names: list[str], **options: Any) -> dict[str, Any]:
    from minimoe.integrations.lm_eval import local_tasks

    return harness.simple_evaluate(model, tasks=local_tasks(names, data), bootstrap_iters=0, **options)


def test_the_harness_gets_the_same_through_transformers(harness: Any, engine: Engine, data: Path) -> None:
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM

    from minimoe.integrations.lm_eval import MinimoeLM

    theirs = HFLM(pretrained=str(resolve("tiny")), dtype="float32", device="cpu", batch_size=1)
    ours, reference = (evaluated(harness, lm, data, LITTLE) for lm in (MinimoeLM(engine=engine), theirs))
    assert set(ours["samples"]) == set(LITTLE)
    for name in LITTLE:
        metrics = [key for key in ours["results"][name] if key.startswith("acc") and "stderr" not in key]
        assert metrics
        assert [ours["results"][name][m] for m in metrics] == [reference["results"][name][m] for m in metrics]
        for one, other in zip(ours["samples"][name], reference["samples"][name], strict=True):
            assert one["arguments"] == other["arguments"]
            for (mine, greedy), (wanted, their_greedy) in zip(
                one["filtered_resps"], other["filtered_resps"], strict=True
            ):
                assert mine == pytest.approx(wanted, abs=1e-4)
                assert greedy == their_greedy


def test_it_is_a_model_by_name_and_runs_subjects_of_mmlu(harness: Any, tmp_path: Path) -> None:
    data = write_benchmarks(tmp_path)
    (data / "mmlu/test/animal_stories_test.csv").unlink()  # no subject of the harness
    options = {"model_args": "pretrained=tiny,router=elbow", "num_fewshot": 1}
    found = evaluated(harness, "minimoe", data, ["mmlu"], **options)
    assert set(found["samples"]) == {"mmlu_astronomy"}
    (sample,) = found["samples"]["mmlu_astronomy"]
    context = sample["arguments"][0][0]
    assert context.count("Answer:") == 2
    assert context.endswith("The sky is\nA. blue\nB. near\nC. upon\nD. a boat\nAnswer:")


def test_whole_texts_and_generation(harness: Any, engine: Engine) -> None:
    from minimoe.integrations.lm_eval import MinimoeLM

    model = MinimoeLM(engine=engine)
    text = "Once upon a time there was a fox. " * 3
    (total,) = model.loglikelihood_rolling([SimpleNamespace(args=(text,))])
    assert total == pytest.approx(engine.score("", text).logprob, abs=1e-4)
    options = {"until": ["."], "max_gen_toks": 12}
    (written,) = model.generate_until([SimpleNamespace(args=("Once upon a time", options))])
    assert written == engine.generate("Once upon a time", max_new_tokens=12, temperature=0, stop=".").text
    long = [7] * (model.max_length + 50)
    (cut,) = model._loglikelihood_tokens([(("", ""), long, [5, 6])])
    assert math.isfinite(cut[0])
    assert cut[0] == pytest.approx(
        engine.score([7] * (model.max_length - 2), [5, 6]).logprob, abs=0.1
    )  # one token less of the same


def test_without_the_harness_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lm_eval", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "minimoe.integrations.lm_eval", raising=False)
    with pytest.raises(InputError, match=r"pip install 'minimoe\[eval\]'"):
        __import__("minimoe.integrations.lm_eval")


def test_importing_the_package_alone_needs_nothing() -> None:
    code = "import sys, minimoe.integrations; print('lm_eval' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
