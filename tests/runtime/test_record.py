"""Recorded states and observations, replayed through a fresh policy, give the recorded decisions."""

from __future__ import annotations

import dataclasses
import gc
import json
import resource
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from fake_engine import build, replay, workload

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.errors import ResultsError
from bullet.runtime import record
from bullet.runtime.serve import recheck
from bullet.state import Partition, PrefillStep
from tests.test_fuzz_readers import MUTATIONS, besiege

POLICIES = ("bullet", "bullet-literal", "bullet-plus", "static-6", "sglang-64", "vllm-256")


def rows(count=25):
    rng = np.random.default_rng(3)
    return [(float(t), int(p), int(o)) for t, p, o in zip(
        np.cumsum(rng.exponential(0.005, count)), rng.integers(1, 200, count), rng.integers(1, 25, count), strict=True)]


def recorded(path, policy, requests, extra=None, **options):
    """A run with its record. Steps are slower than the estimator thinks: it learns from what it observes."""
    writer = None

    def start(run):
        nonlocal writer
        writer = record.RecordWriter(path, run.config, run.state.splits, run.state.kv.total_blocks, 4,
                                     [run.mean_slo_s] * len(requests), workload(requests), extra or {})
        run.record = writer

    run, _, _ = replay(requests, policy, before=start, blocks=60, turns=False,
                       seconds=lambda kind, tokens, layers: layers * (3e-4 + 7e-6 * tokens), **options)
    assert writer is not None
    with writer:
        return run


def fresh(header, config, splits):
    return build(config.policy.name, config, splits)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_fresh_policy_decides_as_recorded(tmp_path, policy):
    run = recorded(tmp_path / "r.jsonl", policy, rows())
    assert record.replay(tmp_path / "r.jsonl", fresh) == (run.decisions, [])


def test_another_policy_does_not(tmp_path):
    recorded(tmp_path / "r.jsonl", "static-6", rows())
    _, differences = record.replay(tmp_path / "r.jsonl", lambda header, config, splits: build("static-4", config, splits))
    assert len(differences) == 20
    assert "decision 1 (prefill" in differences[0]


def test_what_a_policy_observed_is_part_of_its_decisions(tmp_path):
    """Without the observations bullet predicts other times: the record must hold them."""
    recorded(tmp_path / "r.jsonl", "bullet", rows())
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    (tmp_path / "deaf.jsonl").write_text("\n".join(x for x in lines if not x.startswith('["observe"')) + "\n")
    assert record.replay(tmp_path / "deaf.jsonl", fresh)[1]


def test_a_state_that_went_astray_is_told_from_a_policy_that_did(tmp_path):
    recorded(tmp_path / "r.jsonl", "static-6", rows())
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith('["next_step"'))
    event = json.loads(lines[at])
    event[3] = "0" * 12
    lines[at] = json.dumps(event)
    (tmp_path / "r.jsonl").write_text("\n".join(lines) + "\n")
    _, differences = record.replay(tmp_path / "r.jsonl", fresh)
    assert len(differences) == 1
    assert "the state is" in differences[0]


def test_bad_records_are_refused_and_a_cut_off_line_is_left_out(tmp_path):
    path = tmp_path / "r.jsonl"
    run = recorded(path, "static-6", rows(3))
    text = path.read_text()
    path.write_text(text + '["next_st')
    assert record.replay(path, fresh)[0] == run.decisions
    path.write_text(text + "nonsense\n")
    with pytest.raises(ResultsError, match=r"line .* is not JSON .*: record"):
        record.replay(path, fresh)
    path.write_text('{"schema": "other"}\n')
    with pytest.raises(ResultsError, match="not a bullet-record"):
        record.replay(path, fresh)
    with pytest.raises(ResultsError, match=r"cannot be read .No such file"):
        record.replay(tmp_path / "none.jsonl", fresh)
    header, *events = text.splitlines()
    for changed, words in (({"decode_sms": "abc"}, "decode_sms = 'abc': must be a list"),
                           ({"arrival_s": []}, "must be as long as each other")):
        path.write_text("\n".join([json.dumps(json.loads(header) | changed), *events]) + "\n")
        with pytest.raises(ResultsError, match=words):
            record.replay(path, fresh)
    path.write_text("\n".join([json.dumps({k: v for k, v in json.loads(header).items() if k != "kv_blocks"}), *events]) + "\n")
    with pytest.raises(ResultsError, match="'kv_blocks' is missing"):
        record.replay(path, fresh)
    path.write_text("\n".join([header, '["surprise", 1]', *events]) + "\n")
    with pytest.raises(ResultsError, match="unknown event 'surprise'"):
        record.replay(path, fresh)


@contextmanager
def files_end_at(size):
    """A file may grow to so many bytes and no further: Python gets an OSError, as from a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("where", ["header", "event", "what the buffer holds at the end"])
def test_a_full_disk_is_one_error_wherever_it_strikes(tmp_path, where):
    def written(path, padding=""):
        with ExitStack() as stack:
            def start(run):
                run.record = stack.enter_context(record.RecordWriter(
                    path, run.config, run.state.splits, 60, 4, [1.0] * 25, workload(rows()), {"padding": padding}))
            replay(rows(), "static-6", before=start, blocks=60)
        return path.stat().st_size

    size = written(tmp_path / "whole.jsonl")
    assert size > 3 * 8192  # several buffers full
    limit = {"header": 100, "event": 9000}.get(where, size - 10)
    words = r"r\.jsonl: cannot be written \(File too large\): choose another --record"
    with files_end_at(limit), pytest.raises(ResultsError, match=words):
        written(tmp_path / "r.jsonl", "x" * 20_000 if where == "header" else "")
    gc.collect()  # a file left open would complain here


def test_the_runs_own_error_is_the_one_to_tell(tmp_path):
    run, _, _ = replay(rows(3), "static-6", blocks=60)
    writer = record.RecordWriter(tmp_path / "r.jsonl", run.config, run.state.splits, 60, 4, [1.0] * 3, workload(rows(3)), {})
    with files_end_at(100), pytest.raises(KeyError, match="first"), writer:
        raise KeyError("first")


def test_a_record_makes_answers_and_nothing_else():
    """A name in a file is no reason to call what has it."""
    step = PrefillStep(8, 2, (1, 2), target=Partition(4, 4))
    assert record.rebuilt(record.plain(step)) == step
    with pytest.raises(KeyError):
        record.rebuilt({"is": "SystemState"})


@pytest.mark.parametrize("policy", ["bullet", "vllm-256"])
def test_a_damaged_record_is_replayed_or_refused_in_one_line(tmp_path, policy):
    """Read, and made a policy and a run again, as the command does: 2,000 mutations by default."""
    path = tmp_path / "r.jsonl"
    recorded(path, policy, rows(3), extra={"gpu": dataclasses.asdict(get_gpu("a100-80gb")),
                                           "model": dataclasses.asdict(get_model("tiny"))})
    besiege(path, path.read_bytes(), recheck, MUTATIONS // 2)
