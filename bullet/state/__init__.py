"""What a policy may know (requests, batches, KV, the partition), what it may answer, and the only legal transitions.

A policy reads :class:`SystemState` and returns a step or :class:`Wait`; a driver, simulated or real, carries it out. True output
lengths are not here: drivers keep them.
"""

from bullet.state.batches import DecodeBatch, PrefillBatch
from bullet.state.decisions import (
    Chunk,
    Decision,
    DecodeStep,
    HybridStep,
    Partition,
    PrefillStep,
    Published,
    SplitTable,
    Step,
    Wait,
)
from bullet.state.kv import KvCache, kv_cache_of
from bullet.state.requests import DECODE, HYBRID, PREFILL, Phase, Request, WaitingQueue
from bullet.state.system import InFlight, SystemState

__all__ = ["DECODE", "HYBRID", "PREFILL", "Chunk", "Decision", "DecodeBatch", "DecodeStep", "HybridStep", "InFlight", "KvCache",
           "Partition", "Phase", "PrefillBatch", "PrefillStep", "Published", "Request", "SplitTable", "Step", "SystemState",
           "Wait", "WaitingQueue", "kv_cache_of"]
