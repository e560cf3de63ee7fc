"""Routing rules, one a file, and the registry that gives them their names."""

from minimoe.routers.base import PrefixRouter, Router, RouterContext, decide, rank
from minimoe.routers.elbow import Elbow
from minimoe.routers.entropy import Entropy
from minimoe.routers.gap_ratio import GapRatio
from minimoe.routers.layer_k import LayerK
from minimoe.routers.mask import Mask
from minimoe.routers.max_gap import MaxGap
from minimoe.routers.min_p import MinP
from minimoe.routers.mixed_k import MixedK
from minimoe.routers.random import Random
from minimoe.routers.random_head import RandomHead
from minimoe.routers.random_tail import RandomTail
from minimoe.routers.replay import Replay
from minimoe.routers.skip import Skip
from minimoe.routers.threshold import Threshold
from minimoe.routers.top_any import TopAny
from minimoe.routers.top_k import TopK
from minimoe.routers.top_p import TopP
from minimoe.routers.union import Union

ROUTERS: dict[str, type[Router]] = {
    "top_k": TopK,
    "elbow": Elbow,
    "max_gap": MaxGap,
    "gap_ratio": GapRatio,
    "top_p": TopP,
    "min_p": MinP,
    "threshold": Threshold,
    "entropy": Entropy,
    "skip": Skip,
    "top_any": TopAny,
    "layer_k": LayerK,
    "union": Union,
    "mask": Mask,
    "replay": Replay,
    "mixed_k": MixedK,
    "random": Random,
    "random_tail": RandomTail,
    "random_head": RandomHead,
}

__all__ = ["ROUTERS", "PrefixRouter", "Router", "RouterContext", "decide", "rank"]
