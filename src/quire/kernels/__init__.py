"""One thin wrapper per kernel: it checks shapes, strides, dtypes and devices, then calls the best implementation.

`reference.py` (torch) defines every kernel; the native extension (`csrc/`) implements them for CPUs.
"""
