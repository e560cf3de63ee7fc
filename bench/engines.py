"""The engines that are compared: each loads a checkpoint folder, and is fed token ids.

An engine that is not installed raises ImportError when it is made. A further one is a class here and a line in ENGINES.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from minimoe.cache import KVCache
from minimoe.engine import load
from minimoe.model import Batch
from minimoe.probe import Phase


class BenchEngine(ABC):
    """One engine with a model loaded; it runs one sequence at a time.

    Attributes:
        variants: the ways it can run the experts.
        decode_only: those of them that cannot run a long prompt in reasonable memory.
    """

    variants: Sequence[str]
    decode_only: Sequence[str] = ()

    @abstractmethod
    def __init__(self, folder: Path, threads: int) -> None:
        """Load the checkpoint in the folder, to run on so many threads."""

    @classmethod
    @abstractmethod
    def prepare(cls) -> None:
        """Import all that loading needs, so that whoever times loading can do it first."""

    @abstractmethod
    def begin(self, variant: str, capacity: int) -> None:
        """Forget the sequence and start a new one of at most `capacity` tokens."""

    @abstractmethod
    def feed(self, ids: Sequence[int]) -> Tensor:
        """Run the sequence's next tokens in one pass; the logits [V] that follow the last of them."""


class MiniMoe(BenchEngine):
    """This engine, with the model's own top-k rule."""

    variants = ("bucketed",)

    @classmethod
    def prepare(cls) -> None:
        """Nothing to do: this module's own imports are all there is."""

    def __init__(self, folder: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self._engines = {variant: load(folder, backend=variant) for variant in self.variants}

    def begin(self, variant: str, capacity: int) -> None:
        self._engine = self._engines[variant]
        model = self._engine.model
        self._cache = KVCache(model.config, capacity, model.dtype, model.device)

    def feed(self, ids: Sequence[int]) -> Tensor:
        phase: Phase = "decode" if self._cache.length and len(ids) == 1 else "prefill"
        batch = Batch(torch.tensor(ids), [len(ids)], [self._cache], phase)
        hidden_TD = self._engine.model.forward(batch, self._engine.router)
        return self._engine.model.head(hidden_TD[-1:])[0]


class Transformers(BenchEngine):
    """Hugging Face transformers, with each of the ways to run experts that it has on a CPU."""

    variants = ("eager", "grouped_mm", "batched_mm")
    decode_only = ("batched_mm",)  # it copies three matrices for every token and expert

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

    def begin(self, variant: str, capacity: int) -> None:
        self._model.set_experts_implementation(variant)
        self._cache = self._new_cache(config=self._model.config)

    def feed(self, ids: Sequence[int]) -> Tensor:
        # By place: transformers 5 calls the fourth argument past_key_values in some versions and cache in others.
        output = self._model(torch.tensor([ids]), None, None, self._cache, use_cache=True, logits_to_keep=1)
        return output.logits[0, -1]


ENGINES: dict[str, type[BenchEngine]] = {"minimoe": MiniMoe, "transformers": Transformers}
