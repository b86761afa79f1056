"""Drift's dispatcher: best fit, layers in step with an iteration, and a run worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.errors import ConfigError
from bullet.policies import make_policy
from bullet.policies.base import PolicyContext
from bullet.state import SplitTable
from tests import worlds


class Model:
    """An iteration of n sequences takes 0.16 n / d s on d SMs; a prefill of t tokens t / (1,000 p)."""

    def __init__(self, num_sms: int) -> None:
        self.splits = SplitTable.every(num_sms)
        self.decode_sms = [*self.splits.decode_sms.tolist(), num_sms]
        self.prefill_sms = [*self.splits.prefill_sms.tolist(), num_sms]

    def decode_line(self, num_seqs: int, context_tokens: int, prefill_tokens: int) -> Callable[[int], float]:
        assert prefill_tokens == 0, "alone: contention is in the worst slow-down"
        return lambda index: 0.16 * num_seqs / self.decode_sms[index]

    def prefill_line(self, prompt_tokens: tuple[int, ...], decode: tuple[int, int] | None) -> Callable[[int], float]:
        return lambda index: sum(prompt_tokens) / (1000 * self.prefill_sms[index])


def build(gpu: str = "a100-80gb", tpot_slo_s: float = 0.02, **options: Any) -> Any:
    card = get_gpu(gpu)
    model: Any = Model(card.num_sms)
    return make_policy("muxwise", PolicyContext(get_model("llama-3.1-8b"), card, model.splits, tpot_slo_s, model, options))


class Decoding:
    """Of a state, what the choice of a split asks."""

    def __init__(self, seqs: int) -> None:
        self.decode_seqs, self.decode_context_tokens = seqs, 100 * seqs


@pytest.mark.parametrize(("gpu", "seqs", "sms"), [
    # Within 20 / 1.2 = 16.7 ms: 10 ms on 16 SMs; 20, so 10 on 32; 30, 15; 40, 20, 13.3; none: the largest.
    ("a100-80gb", 1, 16), ("a100-80gb", 2, 32), ("a100-80gb", 3, 32), ("a100-80gb", 4, 48), ("a100-80gb", 100, 96),
    # Within 20 / 1.3 = 15.4 ms on Hopper: 3 still fit 32 (15 ms), 4 take 48; the largest of 132 is 128.
    ("h100", 3, 32), ("h100", 4, 48), ("h100", 100, 128)])
def test_the_fewest_sms_that_keep_tpot_under_the_worst_contention(gpu: str, seqs: int, sms: int) -> None:
    policy = build(gpu)
    policy._choose(Decoding(seqs))
    assert policy.decode_sms == sms
    assert policy.iteration_s == pytest.approx(0.16 * seqs / sms)


def test_splits_are_multiples_of_sixteen_that_the_card_grants() -> None:
    assert [d for d, _ in build().candidates] == [16, 32, 48, 64, 80, 96]
    assert [d for d, _ in build(step_sms=50).candidates] == [50, 100]


def test_layers_in_step_with_the_iterations_beside_them() -> None:
    """Request 0 decodes from 1 ms on, an iteration every 10 ms on 16 SMs (or all); request 1, of 9,200 tokens, comes at 15 ms and
    runs on 92 SMs: 100 ms whole, 3.125 ms a layer, so four layers to an iteration of 10 ms: eight launches without a gap, done
    at 115 ms."""
    def solo(kind: str, tokens: int, sms: int) -> float:
        return 0.010 if kind == "decode" else 0.001 if tokens < 100 else 0.100

    outcome = worlds.run_with(build(), [(0.0, 16, 60), (0.015, 9200, 3)], device=worlds.FixedDevice(solo),
                              device__publish_delay_s=0.0, device__reconfigure_s=0.0)
    names = ("lane", "start_s", "sms", "layers")
    rows = [dict(zip(names, row, strict=True)) for row in zip(*(outcome.steps[name].tolist() for name in names), strict=True)]
    prefill, decode = ([row for row in rows if row["lane"] == lane] for lane in ("prefill", "decode"))
    assert (prefill[0]["sms"], prefill[0]["layers"]) == (108, 32)  # nobody decodes yet: whole, on all SMs
    assert [(row["sms"], row["layers"]) for row in prefill[1:]] == [(92, 4)] * 8
    assert [row["start_s"] for row in prefill[1:]] == pytest.approx([0.015 + 0.0125 * k for k in range(8)])
    assert worlds.times(outcome)[1][0] == pytest.approx(0.115)
    beside = {row["sms"] for row in decode if 0.015 < row["start_s"] < 0.115}
    alone = {row["sms"] for row in decode if not 0.015 < row["start_s"] < 0.115}
    assert beside == {16}
    assert alone == {108}


def test_options_that_cannot_be() -> None:
    for options, said in (({"step_sms": 0}, "1 or more"), ({"step_sms": 107}, "no multiple of it is a split"),
                          ({"worst_slow_down": 0.5}, "1 to 10"), ({"max_prefill_tokens": 0}, "1 or more")):
        with pytest.raises(ConfigError, match=said):
            build(**options)
