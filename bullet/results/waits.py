"""Who waited, how long, and for what: the time before a first token, taken apart."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bullet.results.columns import RequestTable, StepTable

Array = NDArray[np.float64]
ROUNDING_S = 1e-9
"""What sums of a run's steps may be off by."""


def busy_until(steps: StepTable, at_s: Array) -> Array:
    """Seconds, up to each time of ``at_s``, in which a step with prompt tokens ran. One lane runs them: no two overlap."""
    prefills = steps["prefill_tokens"] > 0
    start, end = steps["start_s"][prefills], steps["end_s"][prefills]
    if not len(start):
        return np.zeros(len(at_s))
    order = np.argsort(start, kind="stable")
    edges = np.column_stack([start[order], end[order]]).ravel()
    total = np.cumsum(end[order] - start[order])
    values = np.column_stack([np.concatenate([[0.0], total[:-1]]), total]).ravel()
    found: Array = np.interp(at_s, edges, values)
    return found


def waits(requests: RequestTable, steps: StepTable) -> dict[str, Array]:
    """Columns in seconds, a row a request in the table's order; NaN where a request did not get that far.

    ``queued_s``: arrival to first admission, which is ``behind_prefills_s`` (another's prompt was being computed) and
    ``held_back_s`` (none was: no KV blocks were free, or decodes had the device to themselves); ``prefill_s``: admission to first
    token; ``decode_s``: first token to last, preemptions included. Of several devices the two parts of ``queued_s`` are NaN:
    whose prompts a request waited for is not taken apart there.
    """
    arrival, admitted = requests["arrival_s"], requests["admitted_s"]
    queued = admitted - arrival
    known = np.isfinite(admitted)
    behind = np.full(len(arrival), np.nan)
    behind[known] = np.clip(busy_until(steps, admitted[known]) - busy_until(steps, arrival[known]), 0.0, queued[known])
    if any(" " in lane for lane in set(steps.data.get("lane", np.array([])).tolist())):
        behind[:] = np.nan
    held = np.where(queued - behind < ROUNDING_S, 0.0 * queued, queued - behind)
    return {"queued_s": queued, "behind_prefills_s": behind, "held_back_s": held,
            "prefill_s": requests["first_token_s"] - admitted, "decode_s": requests["finish_s"] - requests["first_token_s"]}
