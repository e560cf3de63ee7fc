"""How fast minimoe's Triton kernels and decode step are on one GPU, beside transformers and what the card could reach.

    python -m bench.gpu                # OLMoE-1B-7B's shape in bfloat16, made at random on the GPU; minutes
    python -m bench.gpu --smoke        # a tiny shape on the CPU, in Triton's interpreter: shows that all of it runs

Before anything is timed the kernels are compared with `reference` in float32 and with the rules, on fresh inputs, and
the logits of decode steps, of a prompt in two passes and of transformers with those of this engine: what is wrong is
not fast. Every timed pass gets new tokens.
Times are those between two CUDA events around a pass (in the smoke, of a clock): medians with quartiles.

Shape letters: B sequences, T tokens, D hidden, E experts, I expert intermediate, V vocabulary.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

if "--smoke" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read once, when triton is first imported

import torch
from torch import Tensor

from bench.report import Spread, machine, publish, table
from bench.synthetic import OLMOE_1B_7B
from minimoe.cache import KVCache
from minimoe.checkpoint import tensor_shapes
from minimoe.config import ModelConfig
from minimoe.decoding.graphs import GraphDecoder
from minimoe.experts import ExpertWeights, find_backend
from minimoe.flops import head_flops, layer_flops, pass_bytes
from minimoe.model import Batch, Olmoe
from minimoe.placing import EXPERT
from minimoe.probe import RoutingRecorder
from minimoe.routers import Elbow, Entropy, GapRatio, MaxGap, MinP, Router, RouterContext, Threshold, TopK, TopP
from minimoe.triton.routing import route

# Standard deviations of the router logits; elbow then keeps 7.6, 6 and 4 of 8 experts (bench/README.md).
GATE_SCALES = (0.5, 2.65, 6.1)
LATEST = 390.0  # seconds after which no further peer is begun, so that all ends within 8 minutes
WARM_UP = 3  # passes that are not counted: the first compiles, and the second may capture a graph
# Of logits: relative L2 distance, median over positions. bench/peers.py says what bfloat16 alone does.
MAX_ERROR = 0.05
BARS = {"decode 1": 3.0, "decode 1 compiled": 1.5, "prefill 2048": 1.5}  # times as fast as transformers' best
MOST_MS = 1.3  # a step of one sequence, on an H100
LEAST_SHARE = 0.8  # of what the bytes that elbow prunes promise to save


@dataclass(frozen=True, slots=True)
class Size:
    """What is run: the model, and how much of it."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    context: int  # tokens before the decoded ones
    rounds: int
    read_bytes: int
    matrix: int
    compiler: str  # of torch.compile
    compiled: tuple[int, ...]  # batches that are also run compiled
    gate_scales: tuple[float, ...] = GATE_SCALES

    @classmethod
    def whole(cls) -> Size:
        return cls(
            config=ModelConfig.from_hf(OLMOE_1B_7B),
            dtype=torch.bfloat16,
            device=torch.device("cuda"),
            batches=(1, 8, 32),
            prompts=(512, 2048),
            context=128,
            rounds=50,
            read_bytes=1 << 32,
            matrix=8192,
            compiler="inductor",
            compiled=(1, 8, 32),
        )

    @classmethod
    def smoke(cls) -> Size:
        small = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
        more = {"num_hidden_layers": 1, "vocab_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
        return cls(
            config=ModelConfig.from_hf({**OLMOE_1B_7B, **small, **more, "eos_token_id": 0, "pad_token_id": 1}),
            dtype=torch.float32,
            device=torch.device("cpu"),
            batches=(1, 2),
            prompts=(6,),
            context=2,
            rounds=1,
            read_bytes=1 << 20,
            matrix=64,
            compiler="eager",
            compiled=(1,),
            gate_scales=GATE_SCALES[:1],
        )


class Bench:
    """The model on the device, and everything that is done with it."""

    def __init__(self, size: Size) -> None:
        self.size, self.config = size, size.config
        self.weights = random_weights(size)
        self.model = Olmoe(size.config, self.weights, find_backend("triton"))
        self.gates = [layer.gate.weight_ED.clone() for layer in self.model.layers]
        self.generator = torch.Generator(size.device).manual_seed(1)

    def scale_gates(self, scale: float) -> None:
        """Router logits of this spread, in place: graphs that were captured see it too."""
        for layer, gate_ED in zip(self.model.layers, self.gates, strict=True):
            layer.gate.weight_ED.copy_(gate_ED * scale)

    def ids(self, *shape: int) -> Tensor:
        return torch.randint(self.config.vocab_size, shape, device=self.size.device, generator=self.generator)

    def seconds(self, make: Callable[[], Any], action: Callable[[Any], Any], rounds: int) -> Spread:
        """Of an action on what `make` returns anew each time; some more come first, to warm up."""
        times = []
        for turn in range(rounds + WARM_UP):
            given = make()
            elapsed = self._events(action, given) if self.size.device.type == "cuda" else _clock(action, given)
            if turn >= WARM_UP:
                times.append(elapsed)
        return Spread.of(times)

    def _events(self, action: Callable[[Any], Any], given: Any) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        action(given)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    def limits(self) -> dict[str, Spread]:
        """Bytes read a second, and floating-point operations a second of a product in the model's dtype."""
        size = self.size
        words = torch.ones(size.read_bytes // 4, device=size.device)
        a, b = (torch.randn(size.matrix, size.matrix, device=size.device).to(size.dtype) for _ in range(2))
        read = self.seconds(lambda: words, torch.sum, size.rounds)
        product = self.seconds(lambda: a, lambda x: x @ b, size.rounds)
        return {"bandwidth": inverse(read, size.read_bytes), "matrix": inverse(product, 2 * size.matrix**3)}

    def check_kernels(self) -> dict[str, float]:
        """The largest distance of a layer's experts from `reference` in float32, relative to the largest output."""
        layer, errors = self.model.layers[0], {}
        kinds = (layer.experts.weights.gate_EID, layer.experts.weights.up_EID, layer.experts.weights.down_EDI)
        exact = find_backend("reference")(ExpertWeights(*([matrix.float() for matrix in kind] for kind in kinds)))
        recorder = RoutingRecorder(self.config.num_layers)
        for tokens in sorted({*self.size.batches, *self.size.prompts[:1]}):
            ids_T = self.ids(tokens)
            recorder.layers = [[] for _ in self.model.layers]
            self.model.forward(Batch(ids_T, [tokens]), Elbow(), recorder)
            (routing,) = recorder.layers[0]
            there = replace(routing, **{n: getattr(routing, n).to(self.size.device) for n in ROUTING_TENSORS})
            x_TD = torch.randn(tokens, self.config.hidden_size, device=self.size.device, generator=self.generator)
            x_TD = x_TD.to(self.size.dtype)
            expected_TD = exact.run(x_TD.float(), there)
            gap = (layer.experts.run(x_TD, there).float() - expected_TD).abs().max() / expected_TD.abs().max()
            errors[f"experts of {tokens}"] = float(gap)
        return errors

    def check_routing(self) -> dict[str, float]:
        """For each rule that the routing kernel knows, the share of tokens that it routes otherwise than the rule."""
        c, T, shares = self.config, max(self.size.batches), {}
        logits_TE = torch.randn(T, c.num_experts, device=self.size.device, generator=self.generator).to(self.size.dtype)
        logits_TE[0] = 1  # ties
        ids_T = self.ids(T)
        context = RouterContext(0, "decode", ids_T, ids_T, ids_T, c.top_k, c.norm_topk_prob)
        for rule in (TopK(), Elbow(), MaxGap(), GapRatio(), TopP(), MinP(), Threshold(), Entropy()):
            expected = rule.route(logits_TE, context)
            found = replace(expected, **{name: torch.empty_like(getattr(expected, name)) for name in ROUTING_TENSORS})
            followed = rule.prefix_rule(context, c.num_experts)
            assert followed is not None, rule
            route(followed, logits_TE, found, torch.zeros(1, dtype=torch.int32, device=self.size.device))
            other_T = (found.experts_TK != expected.experts_TK).any(dim=1) | (found.k_T != expected.k_T)
            shares[f"routing by {type(rule).__name__}"] = float(other_T.float().mean())
        return shares

    def prompted(self, sequences: int, capacity: int, router: Router) -> list[KVCache]:
        """The caches of random prompts."""
        model = self.model
        caches = [KVCache(self.config, capacity, model.dtype, model.device) for _ in range(sequences)]
        lengths = [self.size.context] * sequences
        model.forward(Batch(self.ids(sum(lengths)), lengths, caches), router)
        return caches

    def decoder(self, router: Router) -> GraphDecoder:
        made = GraphDecoder.of(self.model, router)
        assert made is not None, router
        return made

    def check_steps(self, sequences: int) -> float:
        """How far decode steps stray from one pass over the same tokens, experts by `reference` in the model's dtype.

        On a GPU the first step is run as it is, the second is captured and the third replayed.
        """
        caches, decoder = self.prompted(sequences, self.size.context + 3, Elbow()), self.decoder(Elbow())
        twins = [KVCache(self.config, self.size.context + 3, self.model.dtype, self.model.device) for _ in caches]
        for twin, cache in zip(twins, caches, strict=True):
            twin.copy_from(cache, self.size.context)
        ids_B3 = self.ids(sequences, 3)
        rows = [decoder.step(ids_B, caches).clone() for ids_B in ids_B3.T]
        plain = Olmoe(self.config, self.weights, find_backend("reference"))
        hidden_TD = plain.forward(Batch(ids_B3.flatten(), [3] * sequences, twins), Elbow())
        return distance(torch.stack(rows, dim=1).flatten(0, 1), plain.head(hidden_TD))

    def check_chunks(self) -> float:
        """How far a prompt in two passes, the second behind a cache, strays from the prompt in one."""
        ids_T = self.ids(2 * self.size.context)
        (cache,), model = self.prompted(1, 2 * self.size.context, TopK()), self.model
        cache.truncate(0)
        parts = [
            model.forward(Batch(ids_N, [self.size.context], [cache]), TopK())
            for ids_N in ids_T.split(self.size.context)
        ]
        return distance(torch.cat(parts), model.forward(Batch(ids_T, [2 * self.size.context]), TopK()))

    def decode(self, sequences: int, router: Router) -> tuple[Spread, float]:
        """Seconds of a step, and bytes of weights that a step reads, on average."""
        size = self.size
        caches = self.prompted(sequences, self.size.context + size.rounds + WARM_UP, router)
        decoder, experts = self.decoder(router), 0

        def make() -> Tensor:
            nonlocal experts
            for routing, _ in decoder.step_of[sequences].routings() if decoder.step_of else ():
                experts += len(routing.experts_TK[routing.experts_TK < routing.num_experts].unique())
            return self.ids(sequences)

        spread = self.seconds(make, lambda ids_B: decoder.step(ids_B, caches), size.rounds)
        # The last step's routing is not seen.
        hit = experts / (size.rounds + WARM_UP - 1)
        return spread, pass_bytes(self.config, 0, size.dtype.itemsize).total + hit * (
            pass_bytes(self.config, 1, size.dtype.itemsize).experts
        )

    def prefill(self, tokens: int, router: Router) -> tuple[Spread, float]:
        """Seconds of a prompt, and its FLOPs."""
        recorder = RoutingRecorder(self.config.num_layers)
        self.model.forward(Batch(self.ids(tokens), [tokens]), router, recorder)
        pairs = [int(routing.k_T.sum()) for routing in recorder.routings()]
        layers = [layer_flops(self.config, [tokens], [0], p) for p in pairs]
        flops = sum(f.attention + f.gate + f.experts for f in layers) + head_flops(self.config, 1)

        def run(ids_T: Tensor) -> None:
            self.model.head(self.model.forward(Batch(ids_T, [tokens]), router)[-1:])

        return self.seconds(lambda: self.ids(tokens), run, max(2, self.size.rounds // 5)), flops


ROUTING_TENSORS = ("experts_TK", "weights_TK", "k_T")


class Transformers:
    """transformers' model of the same weights: its own copies, with experts packed as it keeps them."""

    def __init__(self, bench: Bench) -> None:
        from transformers import OlmoeConfig, OlmoeForCausalLM, StaticCache

        self._bench, self._cache = bench, StaticCache
        size, c = bench.size, bench.config
        raw = {
            **OLMOE_1B_7B,
            "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size,
            "num_attention_heads": c.num_heads,
            "num_key_value_heads": c.num_kv_heads,
            "num_hidden_layers": c.num_layers,
            "vocab_size": c.vocab_size,
            "num_experts": c.num_experts,
            "num_experts_per_tok": c.top_k,
            "eos_token_id": 0,
        }
        with torch.device(size.device):
            before = torch.get_default_dtype()
            torch.set_default_dtype(size.dtype)
            try:
                self.model = OlmoeForCausalLM(OlmoeConfig(**raw)).eval()
            finally:
                torch.set_default_dtype(before)
        state, ours = self.model.state_dict(), bench.weights
        for name, target in state.items():
            if name in ours:
                target.copy_(ours[name])
                continue
            prefix = name.rpartition(".")[0]
            for e in range(c.num_experts):
                kinds = ("down_proj",) if name.endswith("down_proj") else ("gate_proj", "up_proj")
                target[e].copy_(torch.cat([ours[f"{prefix}.{e}.{kind}.weight"] for kind in kinds]))

    def logits(self, ids_T: Tensor) -> Tensor:
        return self.model(ids_T[None]).logits[0]

    def decode(self, sequences: int, implementation: str, compiled: bool) -> Spread:
        """Seconds of a step of the model's own top-k."""
        bench = self._bench
        size = bench.size
        self.model.set_experts_implementation(implementation)
        cache = self._cache(config=self.model.config, max_cache_len=size.context + size.rounds + WARM_UP)
        self.model(bench.ids(sequences, size.context), None, None, cache, use_cache=True)
        run = self.model.forward
        if compiled:
            run = torch.compile(
                run, backend=size.compiler, mode="reduce-overhead" if size.compiler != "eager" else None
            )
        place = iter(range(size.context, size.context + size.rounds + WARM_UP))

        def step(ids_B1: Tensor) -> None:
            run(ids_B1, None, torch.full_like(ids_B1, next(place)), cache, use_cache=True)

        return bench.seconds(lambda: bench.ids(sequences, 1), step, size.rounds)

    def prefill(self, tokens: int, implementation: str) -> Spread:
        bench = self._bench
        self.model.set_experts_implementation(implementation)
        rounds = max(2, bench.size.rounds // 5)
        return bench.seconds(lambda: bench.ids(1, tokens), lambda ids: self.model(ids, logits_to_keep=1), rounds)


def random_weights(size: Size) -> dict[str, Tensor]:
    """Every tensor of the model, drawn on the device; see bench.synthetic for the scales. Experts lie side by side."""
    config, weights = size.config, {}
    generator = torch.Generator(size.device).manual_seed(0)
    packed: dict[object, Tensor] = {}

    def draw(*shape: int, scale: float) -> Tensor:
        values = torch.empty(shape, dtype=size.dtype, device=size.device)
        return values.normal_(0.0, scale, generator=generator)

    for name, shape in tensor_shapes(config):
        match = EXPERT.fullmatch(name)
        if match:
            kind = match.groups()
            if kind not in packed:
                gain = 2.0 if "down_proj" in name else 1.0
                packed[kind] = draw(config.num_experts, *shape, scale=gain / shape[1] ** 0.5)
            weights[name] = packed[kind][int(name.split(".experts.")[1].split(".")[0])]
        elif "norm" in name:
            weights[name] = 1 + draw(*shape, scale=0.1)
        else:
            weights[name] = draw(*shape, scale=1.0 if "embed" in name else shape[1] ** -0.5)
    return weights


def distance(a_PV: Tensor, b_PV: Tensor) -> float:
    """|a - b| / |b| at each of P positions, L2 over the vocabulary; the median over the positions."""
    a_PV, b_PV = a_PV.float(), b_PV.float()
    return float(((a_PV - b_PV).norm(dim=1) / b_PV.norm(dim=1)).median())


def inverse(seconds: Spread, amount: float) -> Spread:
    """Amounts a second."""
    return Spread(amount / seconds.median, amount / seconds.high, amount / seconds.low, seconds.count)


def _clock(action: Callable[[Any], Any], given: Any) -> float:
    start = time.perf_counter()
    action(given)
    return time.perf_counter() - start


def measure(size: Size) -> dict[str, Any]:
    """Everything, in one run: limits, errors, and a row for each contender in each work.

    Raises:
        SystemExit: something computes another result, so nothing was timed.
    """
    began = time.monotonic()
    bench = Bench(size)
    limits = bench.limits()
    bench.scale_gates(GATE_SCALES[0])
    theirs = Transformers(bench)
    errors = bench.check_kernels() | bench.check_routing()
    errors |= {f"steps of {B}": bench.check_steps(B) for B in size.batches}
    errors["prompt in two passes"] = bench.check_chunks()
    ids_T = bench.ids(16)
    ours_TV = bench.model.head(bench.model.forward(Batch(ids_T, [16]), TopK()))
    errors["transformers"] = distance(theirs.logits(ids_T), ours_TV)
    wrong = [f"{name} by {error:.3f}" for name, error in errors.items() if not error <= MAX_ERROR]
    if wrong:
        sys.exit(f"off by more than {MAX_ERROR}, so nothing was timed: {', '.join(wrong)}.")
    rows: list[dict[str, Any]] = []

    def row(work: str, who: str, seconds: Spread, limit: float | None) -> None:
        rows.append({"work": work, "who": who, "seconds": seconds, "limit_seconds": limit})
        print(f"{work}, {who}: {seconds.text(1e3, 3)} ms", file=sys.stderr)

    for scale in size.gate_scales:
        bench.scale_gates(scale)
        for rule in (TopK(), Elbow()):
            who = f"minimoe {type(rule).__name__}, gate scale {scale}"
            for B in size.batches:
                seconds, read = bench.decode(B, rule)
                row(f"decode {B}", who, seconds, read / limits["bandwidth"].median)
            for T in size.prompts:
                seconds, flops = bench.prefill(T, rule)
                row(f"prefill {T}", who, seconds, flops / limits["matrix"].median)
    bench.scale_gates(GATE_SCALES[0])
    skipped: dict[str, str] = {}

    def peer(work: str, who: str, run: Callable[[], Spread]) -> None:
        """One way of transformers to do it. What fails, or would make the run too long, is named and left out."""
        name = f"transformers {who}"
        if time.monotonic() - began > LATEST:
            skipped[f"{work}, {name}"] = "no time left"
            return
        try:
            row(work, name, run(), None)
        except Exception as error:
            skipped[f"{work}, {name}"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"

    for T in size.prompts:
        for how in ("eager", "grouped_mm"):
            peer(f"prefill {T}", how, lambda T=T, how=how: theirs.prefill(T, how))
    for B in size.batches:
        for how in ("eager", "grouped_mm", "batched_mm"):
            peer(f"decode {B}", how, lambda B=B, how=how: theirs.decode(B, how, compiled=False))
    # The longest to prepare come last. A loop over the experts that have tokens, eager, is no single graph.
    for B in size.compiled:
        for how in ("grouped_mm", "batched_mm"):
            peer(f"decode {B}", f"{how} compiled", lambda B=B, how=how: theirs.decode(B, how, compiled=True))
    return {"limits": limits, "errors": errors, "rows": rows, "findings": findings(rows), "skipped": skipped}


def findings(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was asked for beforehand: what, what was found, and the bar; of top-k at the first gate scale, elbow aside.

    What elbow's pruned bytes promise is the difference of the two rules' memory limits.
    """
    found = []
    of = {(row["work"], row["who"]): row for row in rows}
    for bar, wanted in BARS.items():
        work = bar.removesuffix(" compiled")
        ours = of.get((work, f"minimoe TopK, gate scale {GATE_SCALES[0]}"))
        theirs = [
            row["seconds"].median
            for row in rows
            if row["work"] == work
            and row["who"].startswith("transformers")
            and row["who"].endswith(" compiled") == (bar != work)
        ]
        if ours and theirs:
            ratio = min(theirs) / ours["seconds"].median
            found.append({"what": f"{bar}: times as fast as transformers' best", "found": ratio, "bar": wanted})
    for scale in GATE_SCALES:
        pair = [of.get(("decode 1", f"minimoe {rule}, gate scale {scale}")) for rule in ("TopK", "Elbow")]
        if pair[0] and pair[1]:
            promised = pair[0]["limit_seconds"] - pair[1]["limit_seconds"]
            saved = pair[0]["seconds"].median - pair[1]["seconds"].median
            share = saved / promised if promised else None
            what = f"decode 1, gate scale {scale}: share of what elbow's pruned bytes promise"
            found.append({"what": what, "found": share, "bar": LEAST_SHARE})
        if pair[0] and scale == GATE_SCALES[0]:
            found.append({"what": "decode 1: ms, at most", "found": 1e3 * pair[0]["seconds"].median, "bar": MOST_MS})
    return found


def report(result: Mapping[str, Any]) -> str:
    lines = []
    for row in result["rows"]:
        limit = row["limit_seconds"]
        share = ["", ""] if limit is None else [f"{1e3 * limit:.3f}", f"{limit / row['seconds'].median:.2f}"]
        lines.append([row["work"], row["who"], row["seconds"].text(1e3, 3), *share])
    bars = [[f["what"], "" if f["found"] is None else f"{f['found']:.2f}", str(f["bar"])] for f in result["findings"]]
    limits = result["limits"]
    return "\n".join(
        [
            table(["work", "who", "ms", "limit ms", "limit / time"], lines),
            "",
            table(["asked for", "found", "bar"], bars),
            "",
            f"Read bandwidth {limits['bandwidth'].text(1e-9)} GB/s, products {limits['matrix'].text(1e-12)} TFLOP/s.",
            "Off by: " + ", ".join(f"{name} {error:.4f}" for name, error in result["errors"].items()) + ".",
            *(f"Skipped {name}: {why}." for name, why in result["skipped"].items()),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny shape on the CPU, interpreted; times mean nothing")
    parser.add_argument("--save", action="store_true", help="keep table and JSON under bench/results/")
    arguments = parser.parse_args()
    if not arguments.smoke and not torch.cuda.is_available():
        parser.error("there is no GPU here; --smoke runs a tiny model on the CPU.")
    if arguments.smoke and arguments.save:
        parser.error("the times of a smoke test mean nothing; leave out --save.")
    about = machine(torch.get_num_threads())
    about["gpu"] = None if arguments.smoke else torch.cuda.get_device_name()
    with torch.inference_mode():
        result = measure(Size.smoke() if arguments.smoke else Size.whole())
    text = report(result)
    if arguments.smoke:
        text += "\n\nA smoke test in Triton's interpreter: it ran to its end, and its times mean nothing."
    name = f"gpu-{about['gpu'] or 'smoke'}".replace(" ", "-").lower()
    publish(name, text, {"machine": about, **result}, arguments.save)


if __name__ == "__main__":
    main()
