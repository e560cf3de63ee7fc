"""The training recipe as a whole: exact resumption, an honest split, the exported folder and its measurement."""

from __future__ import annotations

import hashlib
import json
import lzma
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "weights" / "recipe"
CORPUS = ROOT.parent / "shared" / "data" / "corpus"
sys.path.insert(0, str(RECIPE))

import bits  # noqa: E402
import cloze  # noqa: E402
import data  # noqa: E402
import evaluate  # noqa: E402
import export  # noqa: E402
import losses  # noqa: E402
import parameters  # noqa: E402
import router_health  # noqa: E402
import tokenizer as recipe_tokenizer  # noqa: E402
import train  # noqa: E402

from minimoe.config import ModelConfig  # noqa: E402
from minimoe.experts import find_backend  # noqa: E402
from minimoe.model import Batch, Olmoe  # noqa: E402
from minimoe.probe import Probe  # noqa: E402
from minimoe.routers import ROUTERS  # noqa: E402

WORDS = ["the", "old", "fox", "ran", "over", "hill", "river", "while", "small", "hare", "slept", "under", "grass"]


def documents(seed: int, count: int) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, size=int(generator.integers(5, 60)))) + "." for _ in range(count)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus in the form of the real one, with words for stories and turns for dialogue."""
    folder = tmp_path_factory.mktemp("corpus")
    for seed, domain in enumerate(data.SHARES):
        texts = documents(seed, 150)
        if domain == "dialogue":
            texts = [f"User: {text}\nAssistant: {text}\nUser: yes\nAssistant: Enjoy." for text in texts]
        text = f"\n{data.SEPARATOR}\n".join(texts) + "\n"
        (folder / f"{domain}.txt.xz").write_bytes(lzma.compress(text.encode()))
    return folder


@pytest.fixture(scope="module")
def tiny(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config and the tokenizer of a model that trains in seconds."""
    folder = tmp_path_factory.mktemp("tiny")
    learned = recipe_tokenizer.learn(recipe_tokenizer.training_texts(corpus, 50_000), 300)
    learned.save(str(folder / "tokenizer.json"))
    raw = json.loads((RECIPE / "config.json").read_text())
    raw |= {"vocab_size": learned.get_vocab_size(), "hidden_size": 32, "intermediate_size": 16}
    raw |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 8}
    raw |= {"num_experts_per_tok": 2, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def command(corpus: Path, tiny: Path, out: Path, *extra: str) -> list[str]:
    files = ["--corpus", str(corpus), "--config", str(tiny / "config.json"), "--out", str(out)]
    files += ["--tokenizer", str(tiny / "tokenizer.json"), "--cache", str(tiny / "tokens")]
    return [*files, "--tokens", "128", "--context", "32", "--warmup", "3", "--decay-steps", "4", *extra]


def trained(corpus: Path, tiny: Path, out: Path, *extra: str) -> dict[str, torch.Tensor]:
    train.main(command(corpus, tiny, out, *extra))
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    return {f"parameters.{name}": value for name, value in state["parameters"].items()} | {
        f"optimisers.{i}.{key}.{name}": value
        for i, optimiser in enumerate(state["optimisers"])
        for key, values in optimiser["state"].items()
        for name, value in values.items()
    }


@pytest.fixture(scope="module")
def run(corpus: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished run of ten steps."""
    out = tmp_path_factory.mktemp("run")
    trained(corpus, tiny, out, "--steps", "10")
    return out


# Training


def test_a_run_in_two_parts_equals_one_run_bit_for_bit(corpus: Path, tiny: Path, run: Path, tmp_path: Path) -> None:
    trained(corpus, tiny, tmp_path, "--steps", "10", "--until", "4")
    first = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert first["steps_done"] == 4
    resumed = trained(corpus, tiny, tmp_path, "--steps", "10")
    whole = trained(corpus, tiny, run, "--steps", "10")  # already finished: only read
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name

    def log(folder: Path) -> list[dict[str, float]]:
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]

    assert log(tmp_path) == log(run)
    assert [line["step"] for line in log(run)] == list(range(1, 11))


def test_training_lowers_the_loss(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] == pytest.approx(math.log(300), abs=0.2)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3


def test_a_terminated_run_finishes_its_step_and_saves(
    corpus: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, handler = train.Run.step, signal.getsignal(signal.SIGTERM)

    def interrupted(run: train.Run) -> dict[str, float]:
        if run.steps_done == 2:
            signal.raise_signal(signal.SIGTERM)
        return step(run)

    monkeypatch.setattr(train.Run, "step", interrupted)
    train.main(command(corpus, tiny, tmp_path, "--steps", "1000000"))
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["steps_done"] == 3
    assert (tmp_path / "log.jsonl").read_text().count("\n") == 3
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_run_is_not_carried_on_with_another_seed(corpus: Path, tiny: Path, run: Path) -> None:
    with pytest.raises(SystemExit, match="seed 0"):
        train.main(command(corpus, tiny, run, "--steps", "12", "--seed", "1"))


def test_the_learning_rate_warms_up_stays_and_falls_to_zero() -> None:
    scales = [train.learning_rate_scale(step, warmup=4, steps=20, decay_steps=5) for step in range(21)]
    assert scales[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert scales[14:] == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0])


def test_parts_of_a_batch_give_the_gradients_of_the_whole(
    corpus: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "BALANCE_WEIGHT", 0.0)  # the one loss that is no mean over tokens
    gradients = {}
    for parts in (1, 2, 4):
        options = train.arguments(command(corpus, tiny, tmp_path, "--steps", "10", "--parts", str(parts)))
        streams = data.training_streams(corpus, recipe_tokenizer.Tokenizer.from_file(str(options.tokenizer)), tmp_path)
        config = ModelConfig.from_hf(json.loads((tiny / "config.json").read_text()))
        run = train.Run(config, data.Mixture(streams, data.SHARES, 0), options)
        run.parameters["head"].data.normal_(generator=torch.Generator().manual_seed(0))
        monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", lambda *_, **__: None)
        run.step()
        gradients[parts] = {name: value.grad for name, value in run.parameters.items()}
    for parts in (2, 4):
        for name, expected in gradients[1].items():
            torch.testing.assert_close(gradients[parts][name], expected, rtol=1e-3, atol=1e-6, msg=name)


def test_a_batch_that_cannot_be_cut_alike_is_refused(corpus: Path, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--tokens must be a multiple"):
        train.main(command(corpus, tiny, tmp_path, "--steps", "10", "--parts", "3"))


# The corpus


def test_the_split_is_by_text_alone_and_takes_one_in_fifty() -> None:
    texts = sorted({f"{text} {i}" for i, text in enumerate(documents(7, 5000))})
    kept, held_out = data.split(texts)
    assert sorted(kept + held_out) == texts
    assert data.split(held_out + held_out) == ([], held_out + held_out)
    # 5000 draws of probability 1/50: mean 100, standard deviation 9.9.
    assert 60 <= len(held_out) <= 140
    expected = [text for text in texts if int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) % 50 == 0]
    assert held_out == expected


def test_nothing_that_is_trained_on_was_held_out(corpus: Path, tiny: Path) -> None:
    loaded = recipe_tokenizer.Tokenizer.from_file(str(tiny / "tokenizer.json"))
    streams = data.training_streams(corpus, loaded, tiny / "tokens")
    texts = list(recipe_tokenizer.training_texts(corpus, 10**9))
    for domain, stream in streams.items():
        all_documents = data.read_documents(corpus / f"{domain}.txt.xz")
        assert len(all_documents) == 150
        kept, held_out = data.split(all_documents)
        assert held_out
        assert not set(held_out) & set(texts)
        # The streams hold every other document and no other text.
        decoded = loaded.decode(stream.tolist(), skip_special_tokens=False)
        assert decoded == "".join(data.render(domain, text) + data.SEPARATOR for text in kept)


@pytest.mark.skipif(not CORPUS.exists(), reason="needs the training corpus beside the repository")
@pytest.mark.parametrize("domain", ["dialogue", "math"])
def test_the_real_corpus_reads_as_its_manifest_says(domain: str) -> None:
    texts = data.read_documents(CORPUS / f"{domain}.txt.xz")
    assert len(texts) == {"dialogue": 3686, "math": 16473}[domain]
    _, held_out = data.split(texts)
    assert len(held_out) == pytest.approx(len(texts) / 50, rel=0.3)


def test_windows_come_in_their_shares_and_repeat_only_after_all_have_been_read() -> None:
    streams = {"a": np.arange(0, 1001, dtype=np.uint16), "b": np.arange(2000, 2401, dtype=np.uint16)}
    mixture = data.Mixture(streams, {"a": 3, "b": 1}, seed=5, cycle=20)
    inputs_BC, targets_BC = mixture.batch(0, 20, context=10)
    assert torch.equal(inputs_BC[:, 1:], targets_BC[:, :-1])
    assert torch.equal(targets_BC, inputs_BC + 1)
    assert int((inputs_BC[:, 0] < 2000).sum()) == 15
    # 99 windows of domain a make an epoch: 15 a cycle, so 6 cycles read 90 windows without a repeat.
    starts = mixture.batch(0, 120, context=10)[0][:, 0]
    in_a = starts[starts < 2000].tolist()
    assert len(in_a) == len(set(in_a)) == 90
    assert len({start % 10 for start in in_a}) == 1
    # The n-th window is a function of n alone.
    assert torch.equal(mixture.batch(37, 5, 10)[0], mixture.batch(0, 42, 10)[0][37:])


def test_replies_end_with_end_of_text_as_the_chat_template_writes_them(tiny: Path, run: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    export.export(run / "checkpoint.pt", tiny / "config.json", tiny / "tokenizer.json", tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    turns = [("user", "tea please"), ("assistant", "With milk?"), ("user", "yes"), ("assistant", "Enjoy.")]
    messages = [{"role": role, "content": text} for role, text in turns]
    trained_on = data.render("dialogue", "User: tea please\nAssistant: With milk?\nUser: yes\nAssistant: Enjoy.")
    assert loaded.apply_chat_template(messages, tokenize=False) == trained_on + data.SEPARATOR
    asked = loaded.apply_chat_template(messages[:3], tokenize=False, add_generation_prompt=True)
    assert trained_on.startswith(asked)
    assert asked.endswith("\nAssistant:")


# The tokenizer


@pytest.mark.parametrize("text", ["", "the fox", "  two\n\n\ttabs ", "aé🙂ß\x00\u200b", "12345 + 6", "ﬁ ① Å"])
def test_every_text_survives_the_tokenizer(tiny: Path, text: str) -> None:
    loaded = recipe_tokenizer.Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert loaded.decode(loaded.encode(text).ids) == text


def test_digits_are_tokens_of_their_own(tiny: Path) -> None:
    loaded = recipe_tokenizer.Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert loaded.encode("2026").tokens == ["2", "0", "2", "6"]


# The exported folder


def test_the_exported_folder_gives_the_same_loss_in_transformers(tiny: Path, run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export.export(run / "checkpoint.pt", tiny / "config.json", tiny / "tokenizer.json", tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(tmp_path)("the old fox slept near my house", return_tensors="pt").input_ids
    measured = evaluate.Measurement(tmp_path, tmp_path, context=64, sample_bytes=0)
    assert measured.tokenizer.encode("the old fox slept near my house").ids == ids[0].tolist()
    with torch.no_grad():
        expected = float(theirs(ids, labels=ids).loss)
    told = bits.total_bits(measured.model, [ids[0].tolist()], 64, Probe())
    assert told * math.log(2) / (ids.shape[1] - 1) == pytest.approx(expected, rel=1e-5)
    assert (
        theirs.config.eos_token_id
        == theirs.generation_config.eos_token_id
        == measured.tokenizer.token_to_id(data.SEPARATOR)
    )


def test_the_exported_weights_are_the_trained_ones_rounded(tiny: Path, run: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    export.export(run / "checkpoint.pt", tiny / "config.json", tiny / "tokenizer.json", tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    state = torch.load(run / "checkpoint.pt", weights_only=True)["parameters"]
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    assert torch.equal(saved[name], state["1.expert_down"][5].bfloat16())
    assert torch.equal(saved["model.layers.0.self_attn.k_proj.weight"], state["0.attention"][1].bfloat16())
    assert torch.equal(saved["model.layers.0.self_attn.q_norm.weight"], state["0.norms"][1].bfloat16())
    assert sum(tensor.numel() for tensor in saved.values()) == sum(value.numel() for value in state.values())


def test_the_recipe_has_every_feature_of_olmoe_and_fits_in_48_mb() -> None:
    raw = json.loads((RECIPE / "config.json").read_text())
    config = ModelConfig.from_hf(raw)
    assert (config.num_experts, config.top_k) == (64, 8)
    assert not config.norm_topk_prob
    assert not config.tie_word_embeddings
    made = parameters.create(config, 0, torch.device("cpu"))
    assert 2 * sum(value.numel() for value in made.values()) <= 48_000_000


# Evaluation


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 10, 17, 40])
def test_every_token_but_the_first_is_scored_once(tokens: int) -> None:
    ids = list(range(100, 100 + tokens))
    scored: list[int] = []
    for part, skip in bits.windows(ids, 8):
        assert len(part) - 1 <= 8
        assert skip == 0 or skip >= 4  # from the second window on, half a window of context or more
        scored += part[1:][skip:]
    assert scored == ids[1:]


def test_a_short_document_costs_what_one_pass_says(tiny: Path, run: Path) -> None:
    config = ModelConfig.from_hf(json.loads((tiny / "config.json").read_text()))
    state = torch.load(run / "checkpoint.pt", weights_only=True)["parameters"]
    model = Olmoe(config, parameters.checkpoint_weights(state), find_backend("bucketed"))
    streams = [[0, 5, 6, 7], [0, 9], [0, *range(20, 60)]]
    expected = 0.0
    for ids in streams:
        logits = model.head(model.forward(Batch(torch.tensor(ids[:-1]), [len(ids) - 1]), ROUTERS["top_k"]()))
        expected += float(F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum")) / math.log(2)
    health = router_health.RouterHealth(2, 8)
    assert bits.total_bits(model, streams, 64, health) == pytest.approx(expected, rel=1e-5)
    tokens = sum(len(ids) - 1 for ids in streams)
    assert health.load_LE.sum(dim=1).tolist() == [2 * tokens] * 2


@pytest.mark.skipif(shutil.which("xz") is None, reason="needs the xz program")
def test_the_size_is_that_of_the_xz_program() -> None:
    texts = documents(3, 400)
    joined = f"\n{data.SEPARATOR}\n".join(texts).encode()
    packed = subprocess.run(["xz", "-9e", "-c"], input=joined, capture_output=True, check=True).stdout
    assert bits.xz_size(texts) == pytest.approx(len(packed), abs=32)


# The whole measurement


@pytest.fixture(scope="module")
def told(tiny: Path, run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of short tales, and beside it the toy model as exported and measured on it."""
    folder = tmp_path_factory.mktemp("told")
    for seed, domain in enumerate(data.SHARES):
        sentences = [text.capitalize() for text in documents(seed, 500) if len(text) < 100]
        draws = np.random.default_rng(seed)
        tales = [" ".join(draws.choice(sentences, size=9)) for _ in range(500)]
        (folder / f"{domain}.txt.xz").write_bytes(lzma.compress(f"\n{data.SEPARATOR}\n".join(tales).encode()))
    model = folder / "model"
    export.export(run / "checkpoint.pt", tiny / "config.json", tiny / "tokenizer.json", model)
    cloze.main(["--corpus", str(folder), "--out", str(model / "cloze"), "--items", "5"])
    options = ["--context", "64", "--sample-bytes", "1000", "--log", str(run / "log.jsonl")]
    evaluate.main([str(model), "--corpus", str(folder), *options])
    return model


def test_everything_on_the_card_is_measured(told: Path, run: Path) -> None:
    measured = json.loads((told / "measured.json").read_text())
    _, held_out = data.split(data.read_documents(told.parent / "stories.txt.xz"))
    stories = measured["domains"]["stories"]
    assert stories["documents"] == len(held_out) >= 1
    assert stories["bytes"] == len("".join(held_out))
    assert stories["xz_bits_per_byte"] == pytest.approx(8 * bits.xz_size(held_out) / stories["bytes"])
    assert stories["below_xz"] == pytest.approx(1 - stories["bits_per_byte"] / stories["xz_bits_per_byte"])
    assert measured["training"]["steps"] == 10
    assert measured["training"]["tokens"] == 1280
    assert measured["files"]["tokenizer.json"] == hashlib.sha256((told / "tokenizer.json").read_bytes()).hexdigest()
    assert "cloze/poetry.jsonl" in measured["files"]
    rules = measured["rules"]
    assert rules["top_k"]["mean_k"] == [2, 2]
    assert rules["same_mean_k"]["mean_k"] == pytest.approx(rules["elbow"]["mean_k"], rel=0.05)
    for rule in rules.values():
        assert rule["items"] == sum(len(path.read_text().splitlines()) for path in (told / "cloze").iterdir())
        assert min(domain["items"] for domain in rule["domains"].values()) >= 1
        assert rule["right"] == sum(domain["right"] for domain in rule["domains"].values())
        assert sum(rule["k"][0]) == pytest.approx(1)
    # The sample is part of the whole, so the two figures are near each other.
    assert rules["top_k"]["domains"]["stories"]["bits_per_byte"] == pytest.approx(stories["bits_per_byte"], rel=0.2)
    text = (told / "README.md").read_text()
    assert f"| stories | {len(held_out)} |" in text
    assert "<!-- measured:" not in text


def test_parameters_in_use_are_those_of_eight_experts(told: Path) -> None:
    # Two layers: 8 experts of 3 x 32 x 16, 2 in use; attention 4 x 32 x 32; gate 8 x 32; norms 4 x 32; a last norm.
    shared = 2 * (4 * 32 * 32 + 8 * 32 + 4 * 32) + 32 + 300 * 32
    counted = json.loads((told / "measured.json").read_text())["parameters"]
    assert counted == {
        "total": shared + 300 * 32 + 2 * 8 * 3 * 32 * 16,
        "active": shared + 2 * 2 * 3 * 32 * 16,
    }


def test_the_sample_grows_with_its_size_and_keeps_file_order(told: Path) -> None:
    everything = bits.held_out(told.parent, "poetry")
    assert everything == data.split(data.read_documents(told.parent / "poetry.txt.xz"))[1]
    some = bits.held_out(told.parent, "poetry", 1500)
    assert 0 < len(some) < len(everything)
    assert some == [document for document in everything if document in some]
    assert set(bits.held_out(told.parent, "poetry", 500)) <= set(some)
