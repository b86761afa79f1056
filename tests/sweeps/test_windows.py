"""The best schedule of a few requests: orders and splits worked out by hand, and never behind a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bullet.cli.sim import main
from bullet.errors import ConfigError
from bullet.sweeps.windows import Windows, _changed, _every, windows
from bullet.workload import stream
from tests import worlds

Rows = Sequence[tuple[float, int, int]]


def found_for(rows: Rows, seconds: Any, policies: Sequence[str] = ("static-54",), **changes: Any) -> Windows:
    device = worlds.FixedDevice(seconds)
    return windows(worlds.config(device__publish_delay_s=0.0, device__reconfigure_s=0.0, slo__ttft_s=2.0, **changes), policies,
                   size=len(rows), count=1, workload=worlds.workload(rows), device=device)


def by_token(kind: str, tokens: int, sms: int) -> float:
    """A millisecond a prompt token on any SMs, 10 ms an iteration."""
    return 1e-3 * tokens if kind == "prefill" else 0.01


def test_the_shorter_of_two_goes_first() -> None:
    """1,000 and 100 tokens at once: 1.0 and 1.1 s in order of arrival, 0.1 and 1.1 s the shorter first. Of an objective of 2 s
    that is 0.3 on average, where together they take 1.1 s each and one policy served them so: 0.55."""
    found = found_for([(0.0, 1000, 1), (0.0, 100, 1)], by_token)
    (one,) = found.found
    assert one.exact
    assert one.plan is not None
    assert [ids for ids, _ in one.plan] == [(1,), (0,)]
    assert one.best == (2, pytest.approx(-0.3))
    assert one.own["static-54"] == (2, pytest.approx(-0.55))
    ahead, sooner = found.gap("static-54")
    assert (ahead.mean, sooner.mean) == (0, pytest.approx(-0.25))
    assert "every plan tried" in found.text()


def test_waiting_for_a_short_one_may_pay() -> None:
    """A long prompt of 3 s is there at 0, a short one comes at 0.01 s. With full knowledge the long one waits for it: it is late
    in any case (3 s of 2), the short one is not."""
    (one,) = found_for([(0.0, 3000, 1), (0.01, 100, 1)], by_token).found
    assert one.best.met == 1
    assert one.plan is not None
    assert [ids for ids, _ in one.plan] == [(1,), (0,)]
    assert one.own["static-54"].met == 0


def test_decode_runs_beside_a_prefill_where_its_objective_needs_it() -> None:
    """Twenty tokens of 10 ms beside a prefill of 1 s: apart, either the prompt waits or tokens come at (0.2 + 1) / 20 s, over
    50 ms. On other SMs neither feels the other."""
    (one,) = found_for([(0.0, 10, 21), (0.02, 1000, 1)], by_token, slo__tpot_s=0.05).found
    assert one.best.met == 2
    assert one.plan is None or one.plan[-1][1] > 0


def test_all_plans_of_two_requests() -> None:
    """Together: 1 x d. One by one: 2 orders x d x d."""
    plans = list(_every([4, 7], (0, 12, 36)))
    assert len(plans) == len(set(plans)) == 3 + 2 * 9
    assert {tuple(ids for ids, _ in plan) for plan in plans} == {((4, 7),), ((4,), (7,)), ((7,), (4,))}


def test_a_change_keeps_all_requests() -> None:
    random, plan = stream(1, "test"), (((0, 1), 12), ((2,), 0), ((3, 4, 5), 36))
    for _ in range(500):
        plan = _changed(plan, (0, 12, 36), random)  # type: ignore[assignment]
        assert sorted(i for ids, _ in plan for i in ids) == [0, 1, 2, 3, 4, 5]
        assert all(ids for ids, _ in plan)


@pytest.mark.parametrize("trace", ["azure-code", "sharegpt"])
def test_no_policy_is_ahead_of_the_best_found(trace: str) -> None:
    names = ["bullet", "vllm-1024", "static-96", "sglang-512"]
    config = {"workload.trace": trace, "workload.rate_req_per_s": 30, "workload.num_requests": 30}
    found = windows(config, names, size=6, count=2, trials=40)
    assert len(found.found) == 2
    for one in found.found:
        assert not one.exact
        assert all(one.best >= score for score in one.own.values())
    assert windows(config, names, size=6, count=2, trials=40) == found
    assert "best found" in found.text()


def test_the_command_prints_a_line_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bound", "--best", "2", "--num-windows", "2", "--rate", "20", "--num-requests", "10", "--policies",
                 "vllm-1024,static-96"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("2 windows of 2 requests into an idle device; every plan tried")
    assert [line.split()[0] for line in lines[3:]] == ["vllm-1024", "static-96", "best"]


@pytest.mark.parametrize(("args", "message"), [
    (["--best", "13"], "--best 13: must be 2 to 12 requests"), (["--best", "1"], "--best 1: must be 2 to 12"),
    (["--best", "4", "--num-windows", "0"], "--num-windows 0: must be 1 to 1,000"),
    (["--best", "12", "--num-requests", "20"], "the workload has 20 requests, 96 are needed: --num-requests"),
    (["--num-windows", "4"], "--num-windows 4: has no effect on bound without --best"),
    (["--best", "4", "--seeds", "3"], "--seeds 3: has no effect on bound --best")])
def test_windows_that_cannot_be(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bound", *args]) == 2
    assert message in capsys.readouterr().err


def test_prompts_that_share_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs arrivals at times of their own"):
        windows(worlds.config(workload__arrivals="closed", workload__concurrency=3), ["vllm-1024"], size=2, count=1)
