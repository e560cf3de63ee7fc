"""Where Triton's kernels are tested: on a GPU if there is one, else in Triton's interpreter on the CPU."""

import os

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read once, when triton is first imported
