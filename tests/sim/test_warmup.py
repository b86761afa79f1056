"""What ``--warmup`` leaves out, worked out by hand: 1 ms a token of a step with a prompt, 10 ms a sequence of one without."""

from __future__ import annotations

from typing import Any

import pytest

from bullet.results.metrics import summarise
from tests.worlds import FixedDevice, run

DEVICE = FixedDevice(lambda kind, tokens, sms: tokens * (1e-3 if kind == "prefill" else 1e-2))
ROWS = [(0.0, 100, 4), (1.0, 100, 3), (1.0, 100, 3)]
"""Request 0: [0, 0.1] and tokens at 0.11, 0.12, 0.13. Requests 1 and 2: [1.0, 1.2] and tokens at 1.22, 1.24."""


def summary(**overrides: Any) -> dict[str, Any]:
    return summarise(run("vllm-1024", ROWS, device=DEVICE, **overrides))


def test_without_one_all_counts() -> None:
    found = summary()
    assert (found["completed"], found["steps"], found["total_output_tokens"]) == (3, 7, 10)
    assert found["mean_ttft_ms"] == pytest.approx((100 + 200 + 200) / 3)
    assert found["mean_itl_ms"] == pytest.approx((3 * 10 + 4 * 20) / 7)
    assert (found["median_itl_ms"], found["max_itl_ms"]) == pytest.approx((20, 20))


@pytest.mark.parametrize("warmup", ["1", "0.5s", "1s", "900ms"])
def test_the_first_request_is_left_out(warmup: str) -> None:
    """Two requests, three steps, four gaps of 20 ms; from the second arrival to the last token 0.24 s pass."""
    found = summary(workload__warmup=warmup)
    assert (found["completed"], found["steps"], found["total_output_tokens"], found["warmup_requests"]) == (2, 3, 6, 1)
    assert (found["mean_ttft_ms"], found["mean_tpot_ms"], found["mean_itl_ms"], found["median_itl_ms"]) == pytest.approx(
        (200, 20, 20, 20))
    assert found["request_throughput"] == pytest.approx(2 / 0.24)


def test_a_gap_of_an_earlier_request_counts_if_it_ends_later() -> None:
    """Request 0 decodes on while request 1 arrives at 0.115 and is computed in [0.12, 0.22]: a gap of 100 ms for request 0, then
    two of 20 ms each for both. Of the two gaps of 10 ms the second ends after the arrival; a driver whose device is busy notices
    it at the step's end, when that gap has been noted."""
    found = summarise(run("vllm-1024", [(0.0, 100, 6), (0.115, 100, 3)], device=DEVICE, workload__warmup="1"))
    assert (found["completed"], found["max_itl_ms"]) == (1, pytest.approx(100))
    assert found["mean_itl_ms"] == pytest.approx((100 + 4 * 20) / 5)
    assert found["mean_ttft_ms"] == pytest.approx(105)
