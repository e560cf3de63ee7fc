"""What the paper "Elbow-based MoE Routing" reports for OLMoE-1B-7B-0924-Instruct on one H200: its numbers, not ours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One benchmark of Table 2; pairs are top-8 and elbow-8.

    Attributes:
        accuracy: percent. flops: of a token and layer, by the paper's formula. latency: milliseconds.
        mean_k: under elbow.
    """

    accuracy: tuple[float, float]
    mean_k: float
    flops: tuple[float, float]
    latency: tuple[float, float]


TABLE_2 = {
    "arc_easy": Row((77.82, 78.24), 7.623, (5.37e8, 4.86e8), (11.203, 10.497)),
    "arc_challenge": Row((61.86, 62.29), 7.634, (5.37e8, 4.88e8), (11.531, 10.974)),
    "mmlu": Row((51.74, 51.75), 7.613, (5.37e8, 4.91e8), (13.287, 12.571)),
    "hellaswag": Row((47.02, 46.86), 7.655, (5.37e8, 4.92e8), (14.630, 13.960)),
    "piqa": Row((73.18, 72.85), 7.589, (5.37e8, 4.85e8), (13.398, 12.944)),
    "winogrande": Row((50.36, 50.28), 7.576, (5.37e8, 4.81e8), (9.659, 8.948)),
}

MEAN_K = 7.615
LATENCY_CHANGE = -0.053
SHARP = 0.997
CORRELATION = 0.58
ETA2_ELBOW, ETA2_ELBOW_NOTEBOOK, ETA2_ANGLE = 0.02, 0.002, 0.01
L1_LEAST, L1_MOST, L1_MEAN = 0.019, 0.055, 0.034
LARGEST_SHARE_CHANGE, CV_CHANGE = 0.0216, 0.0283
