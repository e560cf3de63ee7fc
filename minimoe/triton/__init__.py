"""Kernels for GPUs, written in Triton. Nothing outside this package and minimoe.experts.triton needs triton.

With TRITON_INTERPRET=1 in the environment when Python starts, Triton runs the same kernels on the CPU, in numpy: slow,
but enough to test them.
"""
