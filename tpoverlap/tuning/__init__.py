"""What is known about time: a cost model, tables of methods by T, a cache of measurements. Knows no device.

========================  ====================================================================================
``device``, ``devices/``  parameters of one kind of device, with their source
``problem``               what one operation computes and moves
``gemm_time``, ``model``  time of a GEMM, and of an operation by every method
``quantising``            what FP8 adds to it
``buckets``               where a bucket of T ends
``by_tokens``             the method of one operation for every T: a look-up
``heuristic``             such a table from the cost model
``evidence``              which source knows a shape: configuration, cache, cost model
``cache``                 measurements on disk, one file a machine
========================  ====================================================================================
"""

from tpoverlap.tuning.buckets import bucket_bounds, columns_of, samples
from tpoverlap.tuning.by_tokens import ByTokens, Row, merged
from tpoverlap.tuning.cache import cache_file, cache_folder, read_entries, write_entries
from tpoverlap.tuning.device import DeviceModel, known_devices, load_device, recognise
from tpoverlap.tuning.evidence import Evidence, entry_key
from tpoverlap.tuning.gemm_time import gemm_time_us
from tpoverlap.tuning.heuristic import basis_of, best_in_bucket, break_even, candidates_within, estimated_table
from tpoverlap.tuning.model import (
    Candidate,
    Estimate,
    candidates,
    collective_us,
    estimate,
    methods_known,
    plain,
    transfer_us,
)
from tpoverlap.tuning.problem import Kind, Problem

__all__ = [
    "ByTokens",
    "Candidate",
    "DeviceModel",
    "Estimate",
    "Evidence",
    "Kind",
    "Problem",
    "Row",
    "basis_of",
    "best_in_bucket",
    "break_even",
    "bucket_bounds",
    "cache_file",
    "cache_folder",
    "candidates",
    "candidates_within",
    "collective_us",
    "columns_of",
    "entry_key",
    "estimate",
    "estimated_table",
    "gemm_time_us",
    "known_devices",
    "load_device",
    "merged",
    "methods_known",
    "plain",
    "read_entries",
    "recognise",
    "samples",
    "transfer_us",
    "write_entries",
]
