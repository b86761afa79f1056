"""Partitions: what is asked of the driver, in which order, and that nothing is left behind. No GPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_driver import CUresult, StubDriver

from bullet.errors import PartitionError
from bullet.gpu.driver import Driver
from bullet.gpu.partition import green_context_table, simulated_table, software_table, unpartitioned_table
from bullet.gpu.splits import IGNORE_SM_COSCHEDULING, Split, SplitRefusedError, granularity, is_legal, legal_splits, nearest_split

PAIR_CALLS = ["cuDeviceGetDevResource", "cuDevSmResourceSplitByCount",
              "cuDevResourceGenerateDesc", "cuGreenCtxCreate", "cuGreenCtxGetDevResource", "cuGreenCtxStreamCreate",
              "cuDevResourceGenerateDesc", "cuGreenCtxCreate", "cuGreenCtxGetDevResource", "cuGreenCtxStreamCreate"]


def table(stub: StubDriver, *splits: tuple[int, int], **options):
    return green_context_table([Split(*s) for s in splits], driver=Driver(stub), **options)


def nothing_left(stub: StubDriver) -> bool:
    return not stub.contexts and not stub.streams


@pytest.mark.parametrize(("capability", "flags", "expected"), [
    ((7, 0), 0, (2, 2)), ((8, 0), 0, (4, 2)), ((8, 9), 0, (4, 2)), ((9, 0), 0, (8, 8)), ((12, 0), 0, (8, 8)),
    ((9, 0), IGNORE_SM_COSCHEDULING, (2, 2))])
def test_granularity_by_compute_capability(capability, flags, expected):
    assert granularity(capability, flags) == expected


def test_granularity_refuses_maxwell():
    with pytest.raises(PartitionError, match=r"need 6\.0 or newer"):
        granularity((5, 2))


def test_hopper_splits_are_a_multiple_of_eight_and_the_remainder():
    splits = legal_splits(132, granularity((9, 0)))
    assert {Split(112, 20), Split(104, 28), Split(72, 60), Split(20, 112), Split(124, 8)} <= set(splits)
    assert Split(116, 16) in splits  # decode is the group here
    assert Split(128, 4) not in splits
    assert Split(114, 18) not in splits
    assert legal_splits(108, granularity((8, 0)))[0] == Split(104, 4)


@given(st.integers(4, 200), st.sampled_from([(7, 0), (8, 0), (9, 0)]), st.floats(0, 1))
def test_nearest_split_is_legal_and_no_other_is_nearer(num_sms, capability, share):
    rule = granularity(capability)
    splits = legal_splits(num_sms, rule)
    if not splits:
        with pytest.raises(PartitionError, match="cannot be split"):
            nearest_split(num_sms, rule, share)
        return
    best = nearest_split(num_sms, rule, share)
    assert is_legal(best, num_sms, rule)
    assert all(abs(best.decode_sms - share * num_sms) <= abs(s.decode_sms - share * num_sms) for s in splits)


def test_call_order_and_read_back():
    stub = StubDriver()
    with table(stub, (112, 20), (116, 16)) as made:
        assert stub.calls[:3] == ["cuInit", "cuDriverGetVersion", "cuDeviceGet"]
        assert [c for c in stub.calls[3:] if c != "cuDeviceGetAttribute"] == PAIR_CALLS * 2
        assert [p.granted for p in made.pairs] == [Split(112, 20), Split(116, 16)]
        for pair in made.pairs:
            p, d = (stub.contexts[stub.streams[lane.handle]] for lane in pair.lanes)
            assert (len(p), len(d)) == pair.granted
            assert not p & d
        # The second split's decode side is the multiple of eight: it is the group, the first GPC's eight pairs, and prefill the
        # rest.
        assert stub.contexts[stub.streams[made.pairs[1].decode.handle]] == {16 * pair + i for pair in range(8) for i in (0, 1)}
        assert made.lane("decode", 20) is made.pairs[0].decode
        with pytest.raises(PartitionError, match=r"no decode lane of 44 SMs.*112\+20, 116\+16"):
            made.lane("decode", 44)
    assert nothing_left(stub)
    made.close()  # a second time: nothing to do
    assert stub.calls.count("cuGreenCtxDestroy") == 4


def test_streams_are_destroyed_before_contexts_and_graphs_before_streams():
    stub = StubDriver()
    made = table(stub, (112, 20))
    made.before_close.append(lambda: stub.calls.append("graphs released"))
    made.close()
    assert stub.calls[-5:] == ["graphs released", *["cuStreamDestroy"] * 2, *["cuGreenCtxDestroy"] * 2]


def test_granted_differs_from_asked_is_reported():
    stub = StubDriver(num_sms=142, capability=(8, 9), shrink=6)  # an L40S: 120 asked, 114 granted
    with table(stub, (120, 22)) as made:
        assert (made.pairs[0].asked, made.pairs[0].granted) == (Split(120, 22), Split(114, 28))


def test_wrapped_streams_carry_the_drivers_handle():
    stub = StubDriver()
    with table(stub, (112, 20), wrap_stream=lambda handle: SimpleNamespace(cuda_stream=handle)) as made:
        assert made.pairs[0].prefill.stream.cuda_stream in stub.streams


def test_an_illegal_split_is_refused_and_the_others_are_made():
    stub = StubDriver()
    with table(stub, (130, 2), (112, 20), (66, 66)) as made:
        assert [p.asked for p in made.pairs] == [Split(112, 20)]
        assert [s for s, _ in made.refused] == [Split(130, 2), Split(66, 66)]
        assert "nearest is 124+8" in made.refused[0][1]
    assert nothing_left(stub)


def test_a_split_that_the_driver_refuses_leaves_nothing_of_itself():
    stub = StubDriver(fail={"cuGreenCtxCreate": (CUresult.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, 3)})
    with table(stub, (112, 20), (104, 28)) as made:
        assert [p.asked for p in made.pairs] == [Split(112, 20)]
        assert "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION" in made.refused[0][1]
        assert len(stub.contexts) == len(stub.streams) == 2
    assert nothing_left(stub)


def test_no_split_granted_is_one_error():
    stub = StubDriver()
    with pytest.raises(PartitionError, match=r"no split was granted: split 130\+2 of 132"):
        table(stub, (130, 2))
    with pytest.raises(PartitionError, match="no split was asked for"):
        table(stub)


@pytest.mark.parametrize("call", sorted(set(PAIR_CALLS)))
@pytest.mark.parametrize("after", [0, 1])
def test_failures_of_the_mechanism_leave_no_context_behind(call, after):
    after = min(after, PAIR_CALLS.count(call) - 1)
    stub = StubDriver(fail={call: (CUresult.CUDA_ERROR_OUT_OF_MEMORY, after)})
    with pytest.raises(PartitionError, match=f"{call} answered CUDA_ERROR_OUT_OF_MEMORY: a context needs"):
        table(stub, (112, 20))
    assert nothing_left(stub)


@pytest.mark.parametrize("call", sorted(set(PAIR_CALLS)))
def test_a_mechanism_that_fails_late_keeps_the_pairs_made_until_then(call):
    stub = StubDriver(fail={call: (CUresult.CUDA_ERROR_OUT_OF_MEMORY, PAIR_CALLS.count(call))})
    with table(stub, (112, 20), (104, 28), (96, 36)) as made:
        assert [p.granted for p in made.pairs] == [Split(112, 20)]
        assert [s for s, _ in made.refused] == [Split(104, 28), Split(96, 36)]
        assert all(f"{call} answered CUDA_ERROR_OUT_OF_MEMORY: a context needs" in why for _, why in made.refused)
        assert len(stub.contexts) == len(stub.streams) == 2
    assert nothing_left(stub)


def test_a_lanes_context_is_current_only_inside():
    stub = StubDriver()
    with table(stub, (112, 20)) as made:
        with made.current(made.pairs[0].decode):
            assert len(stub.contexts[stub.pushed]) == 20
        assert stub.pushed is None
        with pytest.raises(ZeroDivisionError), made.current(made.pairs[0].decode):
            _ = 1 / 0
        assert stub.pushed is None
        with made.current(unpartitioned_table(132, int).pairs[0].decode):  # a plain stream has no context of its own
            assert stub.pushed is None


def test_interrupt_while_creating_leaves_no_context_behind():
    stub = StubDriver()

    def interrupted(handle: int) -> int:
        if len(stub.streams) == 3:
            raise KeyboardInterrupt
        return handle

    with pytest.raises(KeyboardInterrupt):
        table(stub, (112, 20), (104, 28), wrap_stream=interrupted)
    assert nothing_left(stub)


def test_an_exception_in_the_block_destroys_and_is_not_masked():
    stub = StubDriver(fail={"cuStreamDestroy": (CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED, 0)})

    def block():
        with table(stub, (112, 20)):
            stub.streams.clear()  # as after a sticky error: every destroy fails
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()
    assert stub.calls.count("cuStreamDestroy") == 2
    assert not stub.contexts


def test_close_attempts_everything_and_raises_the_first_failure():
    stub = StubDriver()
    made = table(stub, (112, 20))
    stub.streams.popitem()  # one stream handle is bad from here on
    stub.fail["cuStreamDestroy"] = (CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED, 0)
    stub.streams.clear()
    with pytest.raises(PartitionError, match="cuStreamDestroy answered"):
        made.close()
    assert not stub.contexts


@pytest.mark.parametrize(("stub", "message"), [
    (StubDriver(fail={"cuInit": (CUresult.CUDA_ERROR_NO_DEVICE, 0)}), "no NVIDIA GPU is visible"),
    (StubDriver(missing=frozenset({"cuInit"})), "no NVIDIA driver"),
    (StubDriver(version=12020), r"driver supports CUDA 12\.2: green contexts need 12\.5"),
    (StubDriver(missing=frozenset({"cuGreenCtxCreate"})), "the driver has no cuGreenCtxCreate"),
    (StubDriver(absent=frozenset({"cuDevSmResourceSplitByCount"})), "this cuda-bindings has no cuDevSmResource"),
    (StubDriver(absent=frozenset({"CUdevResourceType"})), "this cuda-bindings has no CUdevResourceType"),
    (StubDriver(fail={"cuDeviceGetDevResource": (CUresult.CUDA_ERROR_NOT_SUPPORTED, 0)}), "no green contexts: driver"),
    (StubDriver(capability=(5, 2)), "need 6.0 or newer"),
])
def test_devices_and_drivers_without_green_contexts(stub, message):
    with pytest.raises(PartitionError, match=message) as caught:
        table(stub, (112, 20))
    assert "\n" not in str(caught.value)
    assert nothing_left(stub)


def test_software_backend_refuses_torch_operations_by_name():
    made = software_table([Split(100, 32)], 132, lambda priority: f"stream{priority}")
    made.allow("memory_stream", takes_num_sms=True)
    with pytest.raises(PartitionError, match="gemm_qkv is a torch operation"):
        made.allow("gemm_qkv", takes_num_sms=False)
    with pytest.raises(SplitRefusedError, match=r"split 100\+40"):
        software_table([Split(100, 40)], 132, lambda priority: None)


def test_unpartitioned_is_one_pair_on_all_sms():
    made = unpartitioned_table(132, lambda priority: ("stream", priority), priorities=(0, -1))
    assert made.pairs[0].granted == (132, 132)
    assert made.pairs[0].decode.stream == ("stream", -1)
    made.allow("gemm_qkv", takes_num_sms=False)


def test_simulated_table_grants_what_the_arithmetic_allows():
    made = simulated_table([Split(112, 20), Split(20, 112)], 132, (9, 0))
    assert [p.granted for p in made.pairs] == [(112, 20), (20, 112)]
    with pytest.raises(SplitRefusedError, match="nearest is"):
        simulated_table([Split(114, 18)], 132, (9, 0))


def test_bindings_without_a_driver_say_so():
    """The real bindings, where installed: no libcuda here, one clear line."""
    pytest.importorskip("cuda.bindings")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("a driver is present")
    with pytest.raises(PartitionError, match="no NVIDIA driver"):
        Driver.load().version()
