"""Kernels in C++ for x86-64: products, experts, norms, attention, routing, and whole decode steps."""

from minimoe.native.kernels import Kernels
from minimoe.native.sets import NOT_BUILT, best_kernels, find_kernels, instruction_sets, kernels_for

__all__ = ["NOT_BUILT", "Kernels", "best_kernels", "find_kernels", "instruction_sets", "kernels_for"]
