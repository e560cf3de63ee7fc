"""The registered rules that choose freely, tested in test_free_rules.py; with keys that let each run."""

from __future__ import annotations

FREE_RULES: dict[str, str] = {
    "gap_ratio": "gap_ratio",  # keeps a prefix, but looks no further than its cap
    "layer_k": "layer_k:k=1",
    "top_any": "top_any:p=0.03",
    "union": "union",
    "mask": "mask:forbid=1",
    "mixed_k": "mixed_k:k=1.5",
    "random": "random",
    "random_tail": "random_tail",
    "random_head": "random_head",
    "replay": "",
}
