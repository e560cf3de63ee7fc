"""The GPU benchmark runs to its end without a GPU: a tiny model on the CPU, in Triton's interpreter."""

from __future__ import annotations

import importlib
import json
import sys

import pytest
import torch

from tests.accelerator import DEVICE

pytest.importorskip("triton")
gpu = importlib.import_module("bench.gpu")

pytestmark = [
    pytest.mark.skipif(DEVICE.type == "cuda", reason="the kernels are compiled here, not interpreted"),
    pytest.mark.usefixtures("quick_interpreter"),
]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter every program takes its time."""
    for module, name, value in (("attention", "SPLITS", 2), ("pairs", "ROWS", 32)):
        monkeypatch.setattr(importlib.import_module(f"minimoe.triton.{module}"), name, value)


@pytest.mark.timeout(600)  # 20 s of processor time, on a machine that may be busy
def test_the_smoke_test_runs_everything(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--smoke"])
    gpu.main()
    out = capsys.readouterr().out
    assert "its times mean nothing" in out
    result = json.loads(out.splitlines()[-1])
    assert result["bench"] == "gpu-smoke"
    assert max(result["errors"].values()) < 1e-3  # float32
    assert set(result["errors"]) >= {
        "experts of 1",
        "experts of 2",
        "steps of 1",
        "steps of 2",
        "prompt in two passes",
        "transformers",
    }
    who = {(row["work"], row["who"].split(",")[0]) for row in result["rows"]}
    assert who >= {
        ("decode 2", "minimoe Elbow"),
        ("prefill 6", "minimoe TopK"),
        ("prefill 6", "transformers grouped_mm"),
        ("decode 1", "transformers batched_mm compiled"),
    }
    assert all(row["seconds"]["median"] > 0 for row in result["rows"])
    assert all(row["limit_seconds"] > 0 for row in result["rows"] if row["who"].startswith("minimoe"))
    assert result["skipped"] == {}
    asked = [finding["what"].split(":")[0] for finding in result["findings"]]
    assert asked == ["decode 1", "decode 1 compiled", "decode 1, gate scale 0.5", "decode 1"]


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.Bench, "check_kernels", lambda bench: {})
    monkeypatch.setattr(gpu.Bench, "check_steps", lambda bench, sequences: float("nan"))
    with (
        torch.inference_mode(),
        pytest.raises(SystemExit, match=r"off by more than 0.05, so nothing was timed: steps of 1 by nan, steps of 2"),
    ):
        gpu.measure(gpu.Size.smoke())


def test_findings_are_of_the_best_peer_and_of_the_pruned_bytes() -> None:
    def row(work: str, who: str, seconds: float, limit: float | None = None) -> dict[str, object]:
        return {"work": work, "who": who, "seconds": gpu.Spread(seconds, seconds, seconds, 1), "limit_seconds": limit}

    rows = [
        row("decode 1", "minimoe TopK, gate scale 0.5", 2.0, 1.5),
        row("decode 1", "minimoe TopK, gate scale 6.1", 1.0, 0.75),
        row("decode 1", "minimoe Elbow, gate scale 0.5", 1.25, 0.5),
        row("decode 1", "transformers eager", 9.0),
        row("decode 1", "transformers grouped_mm", 8.0),
        row("decode 1", "transformers grouped_mm compiled", 5.0),
    ]
    assert {finding["what"]: finding["found"] for finding in gpu.findings(rows)} == {
        "decode 1: times as fast as transformers' best": 4.0,
        "decode 1 compiled: times as fast as transformers' best": 2.5,
        "decode 1, gate scale 0.5: share of what elbow's pruned bytes promise": 0.75,
        "decode 1: ms, at most": 2000.0,
    }


def test_without_a_gpu_the_real_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "there is no GPU here; --smoke runs a tiny model on the CPU." in capsys.readouterr().err
