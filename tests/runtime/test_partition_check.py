"""The verdicts: what proves a pair, and each way in which it can fail to hold."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_driver import StubDriver

from bullet.gpu.driver import Driver
from bullet.gpu.partition import green_context_table, unpartitioned_table
from bullet.gpu.splits import Split
from bullet.profiler.check import Reading, judge, judge_control, overlap_matrix, run_check, together_ns, unchecked

SPLIT = Split(112, 20)


def reading(smids, start=0, end=1000, run=100, blocks=100) -> Reading:
    return Reading(frozenset(smids), start, end, run, blocks)


GOOD = (reading(range(20, 132)), reading(range(20), 500, 1500))


def test_a_pair_that_holds_is_proven():
    assert judge(SPLIT, GOOD, GOOD) == []


@pytest.mark.parametrize(("change", "reason"), [
    ({0: reading(range(21, 132))}, "prefill ran on 111 SMs, granted 112"),
    ({1: reading(range(21))}, "decode ran on 21 SMs, granted 20"),
    ({1: reading(range(10, 30))}, "the lanes share 10 SMs"),
    ({1: reading(range(20), 1000, 2000)}, "one after the other"),
    ({1: reading(range(20), run=99)}, "only 99 of 100 decode blocks ran"),
])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_each_violation_has_its_reason_in_each_mode(change, reason, mode):
    bad = tuple(change.get(i, r) for i, r in enumerate(GOOD))
    reasons = judge(SPLIT, bad, GOOD) if mode == "eager" else judge(SPLIT, GOOD, bad)
    assert any(reason in r and r.startswith(mode) for r in reasons)


def test_a_graph_that_ran_on_the_primary_context_is_caught():
    everywhere = (reading(range(132)), reading(range(132), 500, 1500))
    reasons = judge(SPLIT, GOOD, everywhere)
    assert "graph: prefill ran on 132 SMs, granted 112" in reasons
    assert "prefill: graph ran on other SMs than eager (20 differ)" in reasons


def test_a_graph_on_as_many_but_other_sms_is_caught():
    moved = (reading(range(112)), reading(range(112, 132), 500, 1500))
    assert judge(SPLIT, GOOD, moved) == ["prefill: graph ran on other SMs than eager (40 differ)",
                                         "decode: graph ran on other SMs than eager (40 differ)"]


def test_without_a_graph_probe_nothing_is_proven():
    assert judge(SPLIT, GOOD, None) == ["graph: not probed"]


def test_negative_control():
    everywhere = reading(range(132))
    assert judge_control(132, (everywhere, everywhere)) == []
    assert "showed 100 of 132" in judge_control(132, (reading(range(100)), everywhere))[0]
    assert any("cannot tell" in r for r in judge_control(132, GOOD))


@given(st.integers(0, 99), st.integers(1, 100), st.integers(0, 99), st.integers(1, 100))
def test_together_is_the_length_of_the_common_interval(a, a_len, b, b_len):
    found = together_ns(reading([], a, a + a_len), reading([], b, b + b_len))
    assert max(0, found) == len(set(range(a, a + a_len)) & set(range(b, b + b_len)))


@given(st.lists(st.frozensets(st.integers(0, 30)), max_size=6))
def test_overlap_matrix_is_symmetric_with_sizes_on_the_diagonal(sets):
    matrix = overlap_matrix(sets)
    for i, a in enumerate(sets):
        assert matrix[i][i] == len(a)
        for j in range(len(sets)):
            assert matrix[i][j] == matrix[j][i] <= min(len(a), len(sets[j]))


class StubProber:
    """Reads the SM sets straight from the stub driver's books."""

    def __init__(self, stub: StubDriver, broken: frozenset[Split] = frozenset(), leak: int = 0) -> None:
        self.stub, self.broken, self.leak = stub, broken, leak
        self.asked: list[tuple[Split, str]] = []

    def probe_pair(self, pair, mode):
        self.asked.append((pair.granted, mode))
        if pair.granted in self.broken:
            raise RuntimeError("CUDA error:\n invalid resource handle")
        p, d = (self.stub.contexts[self.stub.streams[lane.handle]] for lane in pair.lanes)
        return reading(p | set(sorted(d)[:self.leak])), reading(d, 500, 1500)

    def probe_plain(self):
        everywhere = reading(range(self.stub.num_sms))
        return everywhere, everywhere

    def switch_seconds(self, first, second):
        return 3e-6


SPLITS = (SPLIT, Split(104, 28), Split(16, 116))


def check(prober_options=None, splits=SPLITS):
    stub = StubDriver()
    prober = StubProber(stub, **(prober_options or {}))
    with green_context_table(splits, driver=Driver(stub)) as table:
        return run_check(table, prober, "stub GPU"), prober


def test_run_check_proves_every_pair_and_maps_every_overlap():
    report, prober = check()
    assert report.proven
    assert prober.asked == [(p.granted, mode) for p in report.pairs for mode in ("eager", "graph")]
    assert report.verdict(Split(104, 28)) == ("proven", "")
    assert report.verdict(Split(96, 36)) == ("unproven", "pair was not checked")
    names = report.lane_names
    shared = report.overlaps[names.index("112+20 prefill")][names.index("104+28 prefill")]
    assert shared == 104  # the stub hands out SMs from 0: [0, 112) and [0, 104)
    text = "\n".join(report.lines())
    assert "3 of 3 pairs proven" in text
    assert "switch between pairs: 3.0 us" in text


def test_a_leak_is_found_and_rows_say_so():
    report, _ = check({"leak": 3})
    assert not report.proven
    assert report.verdict(SPLIT) == ("unproven", "eager: prefill ran on 115 SMs, granted 112; eager: the lanes share 3 SMs; "
                                                 "graph: prefill ran on 115 SMs, granted 112; graph: the lanes share 3 SMs")


def test_one_failing_probe_leaves_the_others_proven():
    report, _ = check({"broken": frozenset({SPLIT})})
    assert [p.proven for p in report.pairs] == [False, True, True]
    assert report.pairs[0].reasons == ["probe failed: RuntimeError: CUDA error: invalid resource handle"]
    assert "2 of 3 pairs proven" in report.lines()[-1]


def test_refused_splits_are_in_the_report():
    report, _ = check(splits=(SPLIT, Split(130, 2)))
    assert report.refused[0][0] == Split(130, 2)
    assert any("REFUSED" in line and "130+2" in line for line in report.lines())


def test_a_blind_probe_proves_nothing():
    stub = StubDriver()
    prober = StubProber(stub)
    prober.probe_plain = lambda: (reading(range(66)), reading(range(66)))
    with green_context_table([SPLIT], driver=Driver(stub)) as table:
        report = run_check(table, prober, "stub GPU")
    assert report.pairs[0].proven
    assert not report.proven
    assert report.verdict(SPLIT)[0] == "unproven"
    assert "0 of 1 pairs proven" in report.lines()[-1]


def test_json_holds_the_sets(tmp_path):
    report, _ = check()
    report.write(tmp_path / "deep" / "check.json")
    stored = json.loads((tmp_path / "deep" / "check.json").read_text())
    assert stored["proven"] is True
    # 112 are fourteen eights of seven GPCs: the last GPC is left, and two pairs that make no eight.
    assert stored["pairs"][0]["decode_smids"] == sorted([16 * pair + i for pair in range(8) for i in (14, 15)]
                                                        + [128, 129, 130, 131])
    assert len(stored["overlaps"]) == 6


def test_backends_without_partitions_say_none():
    table = unpartitioned_table(132, lambda priority: None)
    report = unchecked(table, "stub GPU", "no partition: plain streams")
    assert report.verdict(Split(132, 132)) == ("none", "no partition: plain streams")
    assert not report.proven
