"""Workloads: built-in traces, sampling, arrivals; all from the seed."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet.config import WorkloadConfig
from bullet.errors import BulletError, ConfigError, TraceError
from bullet.workload import BUILTIN, Workload, describe, load_builtin, load_workload, stream


def load(seed: int = 0, replica: int = 0, **options: Any) -> Workload:
    return load_workload(WorkloadConfig(**options), seed, replica)


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.csv"
    path.write_text("arrival_ms,prompt_tokens,output_tokens\n1000,10,1\n1500,20,2\n1500,30,3\n5000,40,4\n")
    return str(path)


# ---------------------------------------------------------------------------------------------- built-in

# As published with the traces (mean, p50, p90, max), computed there on the source files.
PUBLISHED = {
    "azure-code": (8819, (2047.8, 1469, 5187.6, 7437), (27.9, 13, 55, 1899), 3435.9, 2.57, 13.15),
    "azure-conv": (19366, (1154.7, 1020, 2734.5, 14050), (211.1, 129, 424, 1000), 3501.7, 5.53, 1.09),
    "sharegpt": (58787, (298.8, 36, 829, 241402), (323.7, 280, 683, 37622), None, None, None),
    "arxiv": (2895, (10041, 7958, 18488.8, 31805), (471.4, 332, 652.6, 11452), None, None, None),
}
FIRST_ROWS = {"azure-code": [(0.0, 4808, 10), (0.052, 3180, 8)], "azure-conv": [(0.0, 374, 44), (4.314579, 396, 109)],
              "sharegpt": [(None, 42, 285), (None, 19, 82)], "arxiv": [(None, 7564, 192), (None, 7050, 222)]}


@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_figures(name: str) -> None:
    rows, prompt, output, span, rate, cv = PUBLISHED[name]
    found = describe(name)
    assert found.rows == rows
    assert found.prompt == pytest.approx(prompt, abs=0.05)
    assert found.output == pytest.approx(output, abs=0.05)
    for value, published, digits in ((found.span_s, span, 0.051), (found.rate_req_per_s, rate, 0.005),
                                     (found.cv, cv, 0.005)):
        assert value == (None if published is None else pytest.approx(published, abs=digits))


@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_rows(name: str) -> None:
    table = load_builtin(name)
    for i, (arrival, prompt, output) in enumerate(FIRST_ROWS[name]):
        assert (None if table.arrival_s is None else table.arrival_s[i]) == arrival
        assert (table.prompt_tokens[i], table.output_tokens[i]) == (prompt, output)
    assert min(table.prompt_tokens.min(), table.output_tokens.min()) >= 1
    assert table.arrival_s is None or (np.diff(table.arrival_s) >= 0).all()


def test_builtins_are_named_in_the_attribution() -> None:
    import bullet.workload as package

    text = (Path(package.__file__).parent / "data" / "README.md").read_text(encoding="utf-8")
    for name, builtin in BUILTIN.items():
        assert name in text
        for part in builtin.source.split(", "):
            assert part in text


def test_light_imports() -> None:
    """A workload costs a command no more than numpy."""
    code = ("import sys, bullet.workload as w; from bullet.config import WorkloadConfig as C; "
            "w.load_workload(C(), 0); "
            "print([m for m in ('pandas', 'pyarrow', 'scipy', 'torch') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ------------------------------------------------------------------------------------------------ lengths


def test_in_order(small: str) -> None:
    w = load(trace=small, sample=False, num_requests=3, arrivals="constant", rate_req_per_s=4.0)
    assert w.arrival_s.tolist() == [0.25, 0.5, 0.75]
    assert w.prompt_tokens.tolist() == [10, 20, 30]
    assert w.output_tokens.tolist() == [1, 2, 3]
    assert w.mean_prompt_tokens == 25.0  # of the trace, not of the three
    assert len(w) == 3
    assert len(load(trace=small, sample=False, num_requests=None)) == 4


def test_more_than_there_are(small: str) -> None:
    for options in ({"sample": False}, {"arrivals": "recorded"}):
        with pytest.raises(TraceError, match=r"small.csv: has 4 requests, 5 were asked for"):
            load(trace=small, num_requests=5, **options)
    assert len(load(trace=small, num_requests=5)) == 5


def test_sampled_rows_stay_whole(small: str) -> None:
    """A prompt keeps its own output; every row is drawn about as often."""
    w = load(trace=small, num_requests=4000)
    assert (w.prompt_tokens == 10 * w.output_tokens).all()
    counts = np.bincount(w.output_tokens, minlength=5)[1:]
    assert (abs(counts - 1000) < 4 * math.sqrt(4000 * 0.25 * 0.75)).all()


def test_rate_and_shape_leave_lengths_alone() -> None:
    base = load(num_requests=500)
    for options in ({"rate_req_per_s": 9.0}, {"arrivals": "constant"}, {"arrivals": "gamma", "cv": 3.0}):
        other = load(num_requests=500, **options)
        assert (other.prompt_tokens == base.prompt_tokens).all()
        assert (other.output_tokens == base.output_tokens).all()
        assert (other.arrival_s != base.arrival_s).any()
    assert load(num_requests=500, rate_req_per_s=10.0).arrival_s == pytest.approx(base.arrival_s / 2, rel=1e-15)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**63 - 1), replica=st.integers(0, 100),
       arrivals=st.sampled_from(["poisson", "constant", "gamma"]), count=st.integers(1, 200),
       rate=st.floats(1e-6, 1e6), cv=st.floats(1e-3, 100))
def test_deterministic(seed: int, replica: int, arrivals: str, count: int, rate: float, cv: float) -> None:
    options = {"trace": "arxiv", "arrivals": arrivals, "num_requests": count, "rate_req_per_s": rate, "cv": cv}
    a, b = load(seed, replica, **options), load(seed, replica, **options)
    for name in ("arrival_s", "prompt_tokens", "output_tokens"):
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes()
    assert (np.diff(a.arrival_s, prepend=0.0) >= 0).all()


def test_streams_are_apart() -> None:
    draws = {(seed, purpose, replica): stream(seed, purpose, replica).integers(0, 2**63)
             for seed in (0, 1) for purpose in ("arrivals", "lengths") for replica in (0, 1)}
    assert len(set(draws.values())) == 8
    # The contract of DESIGN.md, spelled out: anyone can draw the same numbers.
    keys = {purpose: np.random.SeedSequence([7, 2, crc32(purpose)]) for purpose in (b"arrivals", b"lengths")}
    w = load(7, 2, num_requests=100, rate_req_per_s=1.0)
    gaps = np.random.default_rng(keys[b"arrivals"]).standard_exponential(100)
    assert (w.arrival_s == np.cumsum(gaps)).all()
    table = load_builtin("azure-code")
    rows = np.random.default_rng(keys[b"lengths"]).integers(0, len(table.prompt_tokens), 100)
    assert (w.output_tokens == table.output_tokens[rows]).all()
    assert (load(0).prompt_tokens != load(1).prompt_tokens).any()
    assert (load(0).prompt_tokens != load(0, 1).prompt_tokens).any()


def test_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        load().prompt_tokens[0] = 1


# ----------------------------------------------------------------------------------------------- arrivals


def test_recorded(small: str) -> None:
    w = load(trace=small, arrivals="recorded", num_requests=None)
    assert w.arrival_s.tolist() == [0.0, 0.5, 0.5, 4.0]
    assert w.prompt_tokens.tolist() == [10, 20, 30, 40]
    w = load(trace=small, arrivals="recorded", num_requests=3, time_scale=2.0)
    assert w.arrival_s.tolist() == [0.0, 0.25, 0.25]
    assert load(1, trace="azure-conv", arrivals="recorded", num_requests=None).describe() == describe("azure-conv")


def test_recorded_needs_times(small: str) -> None:
    for name in ("sharegpt", "arxiv"):
        with pytest.raises(TraceError, match=f"{name}: has no arrival times"):
            load(trace=name, arrivals="recorded")
    with pytest.raises(TraceError, match="has no arrival times"):
        load(trace=small, arrivals="recorded", arrival_column="", num_requests=4)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("arrivals", "cv"), [("poisson", 1.0), ("gamma", 1.0), ("gamma", 0.3), ("gamma", 3.0)])
def test_gaps_have_their_mean_and_cv(seed: int, arrivals: str, cv: float) -> None:
    """Mean within 4 standard errors; the CV's standard error is that of a gamma's, by its kurtosis (delta method)."""
    n, rate = 40_000, 6.45
    gaps = np.diff(load(seed, arrivals=arrivals, cv=cv, rate_req_per_s=rate, num_requests=n).arrival_s, prepend=0.0)
    assert abs(gaps.mean() * rate - 1) < 4 * cv / math.sqrt(n)
    # var(CV) n = CV^2 (kurtosis - 1) / 4 - CV^3 skewness + CV^4, of a gamma: kurtosis 3 + 6 CV^2, skewness 2 CV.
    error = math.sqrt((cv**2 * (2 + 6 * cv**2) / 4 - 2 * cv**4 + cv**4) / n)
    assert abs(gaps.std() / gaps.mean() - cv) < 4 * error


def test_poisson_counts() -> None:
    """Counts in windows of 10 s: variance = mean, and the mean is rate x window."""
    rate, window_s, n = 5.0, 10.0, 100_000
    arrival_s = load(3, rate_req_per_s=rate, num_requests=n).arrival_s
    counts = np.bincount((arrival_s / window_s).astype(int))[:-1]
    assert abs(counts.mean() - rate * window_s) < 4 * math.sqrt(rate * window_s / len(counts))
    assert abs(counts.var() / counts.mean() - 1) < 4 * math.sqrt(2 / len(counts))


def test_constant_accumulates_nothing() -> None:
    arrival_s = load(arrivals="constant", rate_req_per_s=10.0, num_requests=100_000).arrival_s
    assert arrival_s[-1] == 10_000.0


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("options", "says"), [
    ({"trace": "azure-cod"}, "unknown trace 'azure-cod': choose one of azure-code, azure-conv, sharegpt, arxiv, or"),
    ({"trace": ""}, "unknown trace ''"),
    ({"trace": "x" * 5000}, "unknown trace"),
    ({"trace": "nul\0"}, "unknown trace"),
    ({"trace": "azure-code.csv"}, "azure-code.csv: no such trace file"),
    ({"trace": "no/where"}, "no/where: no such trace file"),
    ({"num_requests": 10**12}, "must be 100,000,000 at most"),
    ({"arrivals": "gamma", "cv": 1e-200}, "workload.cv = 1e-200: must be 0.001 to 100"),
    ({"arrivals": "gamma", "cv": 1e200}, "workload.cv = 1e+200: must be 0.001 to 100"),
    ({"rate_req_per_s": 1e-308}, "too small"), ({"rate_req_per_s": 1e-12}, "must be 1e+09 at most"),
    ({"arrivals": "recorded", "time_scale": 1e-308}, "= 1e-308: too small"),
    ({"arrivals": "recorded", "time_scale": 1e-12}, "must be 1e+09 at most"),
    ({"prompt_column": "x"}, "workload.prompt_column = 'x': is for trace files"),
])
def test_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(BulletError) as caught:
        load(**options)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ConfigError | TraceError)


# ------------------------------------------------------------------------------------------------ figures


def test_describe_by_hand(small: str) -> None:
    found = load(trace=small, arrivals="recorded", num_requests=None).describe()
    # Gaps 0.5, 0, 3.5: mean 4/3, variance (25 + 64 + 169) / 36 / 3 = 43/18.
    assert found.rows == 4
    assert found.prompt == pytest.approx((25.0, 25.0, 37.0, 40))
    assert found.output == pytest.approx((2.5, 2.5, 3.7, 4))
    assert (found.span_s, found.rate_req_per_s) == (4.0, 1.0)
    assert found.cv == pytest.approx(math.sqrt(43 / 18) / (4 / 3))


def test_describe_too_few() -> None:
    found = load(num_requests=1).describe()
    assert (found.rows, found.span_s, found.rate_req_per_s, found.cv) == (1, 0.0, None, None)
    with pytest.raises(TraceError, match="unknown trace 'x': choose one of azure-code"):
        describe("x")
