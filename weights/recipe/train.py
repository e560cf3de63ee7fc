"""Train the embedded model. One command starts a run, and the same command carries it on.

Run: python weights/recipe/train.py --steps 2000

A step is a function of the seed, its number and the state before it, and nothing else: a run in two parts equals
one run bit for bit (same machine, same number of threads). The learning rate warms up, stays, and falls to 0 over
the last `--decay-steps` of `--steps`; a run may be carried on with another `--steps` before the fall has begun.

Shape letters: B sequences, C context, T = B * C tokens, D hidden.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from data import SHARES, Mixture, training_streams
from experts import TrainingExperts
from losses import RouterLosses, head_loss
from muon import Muon
from parameters import checkpoint_weights, create, is_matrix
from tokenizers import Tokenizer
from torch import Tensor

from minimoe.config import ModelConfig
from minimoe.model import Batch, Olmoe
from minimoe.routers import ROUTERS

RECIPE = Path(__file__).parent


class Run:
    """A model in training: parameters, optimisers and the number of steps taken."""

    def __init__(self, config: ModelConfig, mixture: Mixture, options: argparse.Namespace) -> None:
        self.config = config
        self.mixture = mixture
        self.options = options
        self.device = torch.device(options.device)
        self.router = ROUTERS["top_k"]()
        self.parameters = create(config, options.seed, self.device)
        matrices = [value for name, value in self.parameters.items() if is_matrix(name)]
        others = [value for name, value in self.parameters.items() if not is_matrix(name)]
        tables = [self.parameters["embed"]]
        rest = [value for value in others if value is not tables[0]]
        groups = [{"params": tables, "lr": options.embed_lr}, {"params": rest, "lr": options.adam_lr}]
        self.optimisers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=options.muon_lr),
            torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        # Each part's thread gets its share of the threads; the optimisers run in this one, with all of them.
        threads = max(torch.get_num_threads() // options.parts, 1)
        self.base_lrs = [[group["lr"] for group in optimiser.param_groups] for optimiser in self.optimisers]
        self.pool = ThreadPoolExecutor(options.parts, initializer=torch.set_num_threads, initargs=(threads,))
        self.steps_done = 0

    def step(self) -> dict[str, float]:
        """One step on the next batch; returns what goes into the log."""
        options, step = self.options, self.steps_done
        sequences = options.tokens // options.context
        batch = self.mixture.batch(step * sequences, sequences, options.context)
        parts = zip(*(ids_BC.tensor_split(options.parts) for ids_BC in batch), strict=True)
        results = list(self.pool.map(self._gradients, parts))
        for name, parameter in self.parameters.items():
            parameter.grad = torch.stack([gradients[name] for gradients, _ in results]).mean(dim=0)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), options.clip)
        scale = learning_rate_scale(step, options.warmup, options.steps, options.decay_steps)
        for optimiser, base in zip(self.optimisers, self.base_lrs, strict=True):
            for group, lr in zip(optimiser.param_groups, base, strict=True):
                group["lr"] = lr * scale
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.steps_done += 1
        means = {name: sum(losses[name] for _, losses in results) / len(results) for name in results[0][1]}
        return {"step": self.steps_done, "lr_scale": scale, "gradient_norm": norm.item()} | means

    def _gradients(self, part: tuple[Tensor, Tensor]) -> tuple[dict[str, Tensor], dict[str, float]]:
        """The gradients and losses of a part of the batch, on leaves of its own so that parts can run side by side."""
        inputs_BC, targets_BC = part
        leaves = {name: value.detach().requires_grad_() for name, value in self.parameters.items()}
        losses = RouterLosses()
        model = Olmoe(self.config, checkpoint_weights(leaves), TrainingExperts)
        batch = Batch(inputs_BC.flatten().to(self.device), [inputs_BC.shape[1]] * inputs_BC.shape[0])
        hidden_TD = model.forward(batch, self.router, losses)
        loss = head_loss(hidden_TD, leaves["head"], targets_BC.flatten().to(self.device))
        gradients = torch.autograd.grad(loss + losses.total(), list(leaves.values()))
        named = {"loss": loss, "balance": losses.balance, "z": losses.z}
        return dict(zip(leaves, gradients, strict=True)), {name: value.item() for name, value in named.items()}

    def save(self, path: Path) -> None:
        """Write everything the next step depends on; an interrupted write leaves the old file whole."""
        state = {
            "steps_done": self.steps_done,
            "seed": self.options.seed,
            "parameters": {name: value.detach() for name, value in self.parameters.items()},
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
        }
        scratch = path.with_suffix(".partial")
        torch.save(state, scratch)
        os.replace(scratch, path)

    def load(self, path: Path) -> None:
        state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        if state["seed"] != self.options.seed:
            raise SystemExit(f"{path} was begun with --seed {state['seed']}; carry it on with the same seed.")
        with torch.no_grad():
            for name, value in self.parameters.items():
                value.copy_(state["parameters"][name])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.steps_done = state["steps_done"]


def learning_rate_scale(step: int, warmup: int, steps: int, decay_steps: int) -> float:
    """Warm-up, plateau, straight fall to 0: the factor for the step with this number, counted from 0."""
    return min(1.0, (step + 1) / warmup, (steps - step) / decay_steps)


def keep_freed_memory() -> None:
    """Tell glibc to keep what is freed: else every large tensor of every step gets pages that are zeroed anew.

    About an eighth of a step on a CPU. Elsewhere than on Linux with glibc this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # From malloc.h: M_MMAP_MAX, M_ARENA_MAX, M_TRIM_THRESHOLD.
        for parameter, value in ((-4, 0), (-8, 1), (-1, 2**31 - 1)):
            mallopt(parameter, value)


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """A list that fills when SIGTERM or SIGINT arrives: a run then finishes its step and saves."""
    received: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda number, _: received.append(number)) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    parser.add_argument("--config", type=Path, default=RECIPE / "config.json", help="the model, as its config.json")
    parser.add_argument("--tokenizer", type=Path, default=RECIPE / "work" / "tokenizer.json")
    parser.add_argument("--out", type=Path, default=RECIPE / "work" / "run", help="checkpoint.pt and log.jsonl")
    parser.add_argument("--cache", type=Path, default=RECIPE / "work" / "tokens", help="the encoded corpus")
    parser.add_argument("--steps", type=int, required=True, help="where the learning rate reaches 0")
    parser.add_argument("--until", type=int, help="stop and save after this step, to be carried on later")
    parser.add_argument("--decay-steps", type=int, default=150)
    parser.add_argument("--warmup", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens in a step")
    parser.add_argument("--context", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--parts", type=int, default=2, help="a batch is cut into this many, computed side by side")
    parser.add_argument("--muon-lr", type=float, default=0.04)
    parser.add_argument("--adam-lr", type=float, default=0.005, help="head, router gates and norms")
    parser.add_argument("--embed-lr", type=float, default=0.02)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    if options.tokens % (options.context * options.parts):
        raise SystemExit("--tokens must be a multiple of --context times --parts, so that all parts are alike.")
    keep_freed_memory()
    config = ModelConfig.from_hf(json.loads(options.config.read_text()))
    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    streams = training_streams(options.corpus, tokenizer, options.cache)
    run = Run(config, Mixture(streams, SHARES, options.seed), options)
    options.out.mkdir(parents=True, exist_ok=True)
    checkpoint = options.out / "checkpoint.pt"
    if checkpoint.exists():
        run.load(checkpoint)
    last = options.steps if options.until is None else min(options.until, options.steps)
    with stop_requests() as stopped, open(options.out / "log.jsonl", "a", buffering=1) as log:
        while run.steps_done < last and not stopped:
            began = time.perf_counter()
            line = run.step()
            line |= {"tokens": options.tokens, "seconds": round(time.perf_counter() - began, 3)}
            log.write(json.dumps(line) + "\n")
            if run.steps_done % options.save_every == 0:
                run.save(checkpoint)
    run.save(checkpoint)


if __name__ == "__main__":
    main()
