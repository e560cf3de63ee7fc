"""The engines that are compared: each loads a checkpoint folder, and is fed token ids.

An engine that is not installed raises ImportError when it is made. A further one is a class here and a line in ENGINES.

Shape letters: B sequences, N new tokens of each, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from minimoe.cache import KVCache
from minimoe.engine import load
from minimoe.experts import default_backend
from minimoe.model import Batch
from minimoe.probe import Phase


class BenchEngine(ABC):
    """One engine with a model loaded; it runs several sequences of the same length side by side.

    Attributes:
        variants: the ways it can run the experts.
        most_tokens: the most tokens that a variant can take in one pass, where memory or the engine sets a limit.
        most_sequences: the most sequences side by side.
    """

    variants: Sequence[str]
    most_tokens: ClassVar[Mapping[str, int]] = {}
    most_sequences: int = 1 << 20

    @abstractmethod
    def __init__(self, folder: Path, threads: int) -> None:
        """Load the checkpoint in the folder, to run on so many threads."""

    @classmethod
    @abstractmethod
    def prepare(cls) -> None:
        """Import all that loading needs, so that whoever times loading can do it first."""

    @classmethod
    def files(cls, folder: Path) -> list[Path]:
        """What it reads, written first if need be; raises as loading does."""
        return sorted(path for path in folder.glob("*") if path.is_file())  # none where there is no folder

    @abstractmethod
    def begin(self, variant: str, sequences: int, capacity: int) -> None:
        """Forget everything and start new sequences of at most `capacity` tokens."""

    @abstractmethod
    def feed(self, ids_BN: Sequence[Sequence[int]]) -> Tensor:
        """Run the sequences' next tokens in one pass; the logits [B, V] that follow the last of each."""


class MiniMoe(BenchEngine):
    """This engine, with the model's own top-k rule."""

    variants = tuple(dict.fromkeys([default_backend(torch.bfloat16, torch.device("cpu")), "bucketed"]))

    @classmethod
    def prepare(cls) -> None:
        """Nothing to do: this module's own imports are all there is."""

    def __init__(self, folder: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self._folder = folder
        self._engines = {self.variants[0]: load(folder, backend=self.variants[0])}

    def begin(self, variant: str, sequences: int, capacity: int) -> None:
        if variant not in self._engines:  # only now, so that loading one is what loading takes
            self._engines[variant] = load(self._folder, backend=variant)
        self._engine = self._engines[variant]
        model = self._engine.model
        self._caches = [KVCache(model.config, capacity, model.dtype, model.device) for _ in range(sequences)]

    def feed(self, ids_BN: Sequence[Sequence[int]]) -> Tensor:
        ids_BN = torch.tensor(ids_BN)
        B, N = ids_BN.shape
        phase: Phase = "decode" if self._caches[0].length and N == 1 else "prefill"
        if phase == "decode" and self._engine.decoder:  # as `generate` runs it
            return self._engine.decoder.step(ids_BN[:, 0], self._caches)
        batch = Batch(ids_BN.flatten(), [N] * B, self._caches, phase)
        hidden_TD = self._engine.model.forward(batch, self._engine.router)
        return self._engine.model.head(hidden_TD[batch.last_rows])


class Transformers(BenchEngine):
    """Hugging Face transformers, with each of the ways to run experts that it has on a CPU."""

    variants = ("eager", "grouped_mm", "batched_mm")
    most_tokens: ClassVar[Mapping[str, int]] = {"batched_mm": 8}  # it copies three matrices for every token and expert

    @classmethod
    def prepare(cls) -> None:
        import transformers
        import transformers.models.olmoe.modeling_olmoe  # transformers itself imports a model when it is asked for

        transformers.logging.disable_progress_bar()

    def __init__(self, folder: Path, threads: int) -> None:
        self.prepare()
        from transformers import AutoModelForCausalLM, DynamicCache

        torch.set_num_threads(threads)
        self._new_cache = DynamicCache
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def begin(self, variant: str, sequences: int, capacity: int) -> None:
        self._model.set_experts_implementation(variant)
        self._cache = self._new_cache(config=self._model.config)

    def feed(self, ids_BN: Sequence[Sequence[int]]) -> Tensor:
        # By place: transformers 5 calls the fourth argument past_key_values in some versions and cache in others.
        output = self._model(torch.tensor(ids_BN), None, None, self._cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1]


class LlamaCpp(BenchEngine):
    """llama.cpp through llama-cpp-python, on a GGUF file of the same bfloat16 weights, written when it is needed."""

    variants = ("BF16",)
    most_sequences = 1  # the Python class runs one sequence

    @classmethod
    def prepare(cls) -> None:
        import llama_cpp  # noqa: F401

    @classmethod
    def files(cls, folder: Path) -> list[Path]:
        cls.prepare()
        from bench.gguf_file import write_gguf

        return [write_gguf(folder)]

    def __init__(self, folder: Path, threads: int) -> None:
        (path,) = self.files(folder)
        import llama_cpp

        self._api = llama_cpp
        self._model = llama_cpp.Llama(
            str(path), n_ctx=4096, n_batch=2048, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def begin(self, variant: str, sequences: int, capacity: int) -> None:
        self._model.reset()

    def feed(self, ids_BN: Sequence[Sequence[int]]) -> Tensor:
        (ids,) = ids_BN
        self._model.eval(ids)
        logits = self._api.llama_get_logits_ith(self._model.ctx, -1)
        return torch.tensor(logits[: self._model.n_vocab()])[None]


ENGINES: dict[str, type[BenchEngine]] = {"minimoe": MiniMoe, "transformers": Transformers, "llama.cpp": LlamaCpp}
