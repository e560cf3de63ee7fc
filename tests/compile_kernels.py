"""Compiles every kernel for an H100, as the code calls them, on a machine without one.

    python -m tests.compile_kernels          # in bfloat16, what a test runs
    python -m tests.compile_kernels --all    # also in float32, for long prompts, with clipping, for every rule

Nothing is launched: launches are turned into compilations, on tensors of the CPU, at the sizes of OLMoE-1B-7B. The
kernels, and how often they were compiled, are printed as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from minimoe.operations import Attention
from minimoe.routers import PrefixRouter, RouterContext
from minimoe.routers.spec import parse_router
from minimoe.routing import Routing
from minimoe.triton.attention import attend_one_each
from minimoe.triton.grouped import run_grouped
from minimoe.triton.operations import TritonOperations
from minimoe.triton.pairs import run_pairs
from minimoe.triton.routing import route

D, I, E, K, H = 2048, 1024, 64, 8, 16
EVERYTHING = sys.argv[1:] == ["--all"]
DTYPES = (torch.bfloat16, torch.float32) if EVERYTHING else (torch.bfloat16,)
TOKENS = (1, 32, 2048) if EVERYTHING else (1, 32)
CLIPS = (None, 8.0) if EVERYTHING else (None,)
MORE_RULES = ("elbow:reading=printed", "max_gap", "gap_ratio", "top_p", "min_p", "threshold:renorm=topk", "entropy")
RULES = ("top_k", "elbow", *(MORE_RULES if EVERYTHING else ()))
compiled: dict[str, int] = {}


class Nowhere:
    """What triton asks a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    made = launch(kernel, *arguments, grid=grid, warmup=True, **options)
    assert ".target sm_90" in made.asm["ptx"]
    assert made.asm["cubin"]
    compiled[kernel.fn.__name__] = compiled.get(kernel.fn.__name__, 0) + 1


launch, JITFunction.run = JITFunction.run, compile_only
triton.runtime.driver.set_active(Nowhere())

for dtype in DTYPES:
    weights = torch.empty(2, I, D, dtype=dtype), torch.empty(2, I, D, dtype=dtype), torch.empty(2, D, I, dtype=dtype)
    for T in TOKENS:
        x_TD = torch.empty(T, D, dtype=dtype)
        slots = torch.empty(T, K, dtype=torch.int64), torch.empty(T, K), torch.empty(T, dtype=torch.int64)
        run = run_pairs if T == 1 else run_grouped
        run(x_TD, Routing(*slots, E), *weights)
        TritonOperations().norm(x_TD, x_TD[0], 1e-5)
    for clip in CLIPS:
        of = Attention(3, H, H, *[x_TD[0]] * 7, 1e-5, clip)
        turns = torch.empty(8, 1, D // H, dtype=dtype)
        attend_one_each(of, x_TD[:8], x_TD[:8], x_TD[:8], (turns, turns), torch.empty(4, 8, dtype=torch.int64))
    for spec in RULES:
        router = parse_router(spec)
        assert isinstance(router, PrefixRouter)
        rule = router.prefix_rule(RouterContext(0, "decode", *[torch.empty(0)] * 3, K, norm_topk_prob=False), E)
        assert rule is not None
        into = Routing(torch.empty(8, K, dtype=torch.int64), torch.empty(8, K), torch.empty(8, dtype=torch.int64), E)
        route(rule, torch.empty(8, E, dtype=dtype), into, torch.zeros(1, dtype=torch.int32))
print(json.dumps(compiled))
