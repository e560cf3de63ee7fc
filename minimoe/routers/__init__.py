"""Routing rules, one a file, and the registry that gives them their names."""

from minimoe.routers.base import PrefixRouter, Router, RouterContext, rank
from minimoe.routers.elbow import Elbow
from minimoe.routers.min_p import MinP
from minimoe.routers.threshold import Threshold
from minimoe.routers.top_k import TopK
from minimoe.routers.top_p import TopP

ROUTERS: dict[str, type[Router]] = {
    "top_k": TopK,
    "elbow": Elbow,
    "top_p": TopP,
    "min_p": MinP,
    "threshold": Threshold,
}

__all__ = ["ROUTERS", "PrefixRouter", "Router", "RouterContext", "rank"]
