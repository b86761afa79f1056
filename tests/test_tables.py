"""The table of samples: rows checked, kept through cut-offs, refused where they do not belong."""

from __future__ import annotations

import json

import pytest

from bullet.errors import ProfileError, ResultsError
from bullet.profiles.journal import Journal, read_journal
from bullet.profiles.rows import COLUMNS, SCHEMA_VERSION, agreement, check_row, finalise, read_parquet, write_parquet

IDENTITY = {"gpu": "stub", "source": "measured"}


def row(**changes):
    base = {"id": "a", "kind": "solo", "op": "gemm_qkv", "backend": "none", "partition": "none", "lane": "full",
            "sms": 132, "device_sms": 132, "corunner": "idle", "median_s": 1e-3, "samples": 25, "source": "measured",
            "gpu": "stub", "measured_at": "2026-11-30T00:00:00+00:00", "model": "m", "dtype": "bfloat16", "tokens": 8,
            "batch": 1, "context_tokens": 0, "run": 0, "order": 0}
    return {**base, **changes}


def test_rows_are_completed_and_checked():
    assert list(check_row(row())) == list(COLUMNS)
    assert check_row(row())["slowdown"] is None
    for change, message in (({"gpu": None}, "'gpu' is missing"), ({"sms": 1.5}, "sms = 1.5: must be int"),
                            ({"sms": True}, "must be int"), ({"median_s": float("nan")}, "must be finite"),
                            ({"speed": 1}, "unknown column 'speed'")):
        with pytest.raises(ProfileError, match=message):
            check_row(row(**change))


def test_every_row_carries_its_provenance():
    for name in ("gpu", "driver", "cuda", "torch", "triton", "clock_sm_hz", "measured_at", "partition", "partition_note"):
        assert name in COLUMNS


def test_rows_are_on_disk_as_soon_as_appended(tmp_path):
    path = tmp_path / "deep" / "samples.jsonl"
    journal = Journal(path, IDENTITY)
    journal.append(row())
    assert len(path.read_text().splitlines()) == 2  # not closed, not even flushed by us
    journal.close()


def test_resuming_reads_back_and_counts_runs(tmp_path):
    path = tmp_path / "s.jsonl"
    with Journal(path, IDENTITY) as journal:
        journal.append(row(id="a"))
        journal.append(row(id="x", kind="anchor"))
    with Journal(path, IDENTITY) as journal:
        assert journal.done() == {"a"}
        assert journal.run == 1
        journal.append(row(id="b", run=1))
    assert [r["id"] for r in read_journal(path)[1]] == ["a", "x", "b"]


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_line_cut_short_is_dropped_and_the_rest_kept(tmp_path, cut):
    path = tmp_path / "s.jsonl"
    with Journal(path, IDENTITY) as journal:
        journal.append(row(id="a"))
        journal.append(row(id="b"))
    raw = path.read_bytes()
    path.write_bytes(raw[:-cut])
    with Journal(path, IDENTITY) as journal:
        assert journal.done() == {"a"}
        journal.append(row(id="c"))
    assert [r["id"] for r in read_journal(path)[1]] == ["a", "c"]


@pytest.mark.parametrize(("text", "message"), [
    ("not json\n", "line 1 is not a JSON object"),
    ('{"schema": "other"}\n', "not a bullet-samples file"),
    ('{"schema": "bullet-samples", "version": 99}\n', "schema version 99"),
    ('{"schema": "bullet-samples", "version": 1, "gpu": "A100", "source": "measured"}\n', "holds rows of gpu 'A100'"),
    ('{"schema": "bullet-samples", "version": 1, "gpu": "stub", "source": "simulated"}\n', "holds rows of source"),
    ('{"schema": "bullet-samples", "version": 1, "gpu": "stub", "source": "measured"}\n{"id": "a"}\n', "line 2: column"),
])
def test_foreign_files_are_refused_untouched(tmp_path, text, message):
    path = tmp_path / "s.jsonl"
    path.write_text(text)
    with pytest.raises(ProfileError, match=message):
        Journal(path, IDENTITY)
    assert path.read_text() == text


def test_two_sweeps_never_write_one_table_at_once(tmp_path):
    path = tmp_path / "samples.jsonl"
    with Journal(path, IDENTITY) as journal:
        journal.append(row())
        with pytest.raises(ProfileError, match="another sweep is writing it"):
            Journal(path, IDENTITY)
    with Journal(path, IDENTITY) as journal:
        assert len(journal.rows) == 1


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match=r"cannot be written .* choose another --out"):
        Journal(tmp_path / "file" / "s.jsonl", IDENTITY)


def test_slowdown_is_over_the_same_lane_alone():
    lane = {"lane": "decode", "sms": 20, "split_prefill_sms": 112, "split_decode_sms": 20}
    rows = [row(id="1", **lane, median_s=2.0), row(id="2", median_s=1.0),
            row(id="3", kind="corun", **lane, median_s=3.0, corunner="prefill_layer"),
            row(id="4", kind="corun", lane="decode", median_s=3.0, corunner="prefill_layer"),
            row(id="5", kind="corun", **{**lane, "sms": 28}, median_s=3.0, corunner="prefill_layer")]
    done = finalise(rows)
    assert [r["slowdown"] for r in done] == [None, None, 1.5, 3.0, None]
    assert "slowdown" not in rows[2]  # input untouched


def test_drift_is_read_from_the_anchors_around_a_row():
    rows = [row(id=f"anchor{i}", kind="anchor", order=order, median_s=s)
            for i, (order, s) in enumerate([(0, 1.0), (10, 1.0), (20, 1.3), (30, 1.0)])]
    rows += [row(id="early", order=5), row(id="late", order=15, median_s=9.0), row(id="steady", order=31),
             row(id="beside", kind="corun", order=6, corunner="x")]
    done = {r["id"]: r for r in finalise(rows)}
    assert done["early"]["drift"] == pytest.approx(0.0)
    assert done["late"]["drift"] == pytest.approx(0.15)
    assert [done[f"anchor{i}"]["drift"] for i in range(4)] == pytest.approx([0.0, 0.0, 0.3, 0.0])  # each by itself
    assert (done["early"]["drift_ok"], done["late"]["drift_ok"], done["steady"]["drift_ok"]) == (True, False, True)
    assert done["beside"]["slowdown"] == 1.0  # the drifted run alone (9.0) is left out of the baseline


def test_without_anchors_drift_is_unknown():
    assert finalise([row()])[0]["drift_ok"] is None


def test_agreement_of_two_runs():
    a = [row(id="a", median_s=1.0), row(id="b", median_s=2.0), row(id="x", kind="anchor")]
    b = [row(id="a", median_s=1.1), row(id="b", median_s=2.0), row(id="c"), row(id="x", kind="anchor", median_s=9.0)]
    common, difference = agreement(a, b)
    assert common == 2
    assert difference == pytest.approx((1 - 1 / 1.1) / 2)
    with pytest.raises(ProfileError, match="no measurement in common"):
        agreement(a, [row(id="z")])


def test_parquet_round_trip(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "s.parquet"
    rows = finalise([row(id="a"), row(id="b", clock_sm_hz=1.98e9, busy=True, partition_note="why")])
    write_parquet(path, rows, {"gpu": "stub"})
    back, metadata = read_parquet(path)
    assert back == rows
    assert metadata["version"] == str(SCHEMA_VERSION)
    assert metadata["gpu"] == "stub"
    assert list(tmp_path.iterdir()) == [path]


def test_a_parquet_row_that_is_no_measurement_is_named(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "s.parquet"
    write_parquet(path, finalise([row(id="a"), row(id="b")]), {"gpu": "stub"})
    table = pq.read_table(path)
    at = table.schema.get_field_index("median_s")
    pq.write_table(table.set_column(at, table.schema.field(at), pa.array([1e-3, float("nan")])), path)
    with pytest.raises(ProfileError, match=r"s.parquet: row 1: median_s = nan: must be finite"):
        read_parquet(path)


def test_parquet_of_another_kind_is_refused(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ProfileError, match="not a bullet-samples table"):
        read_parquet(tmp_path / "other.parquet")
    (tmp_path / "broken.parquet").write_text(json.dumps({}))
    with pytest.raises(ProfileError, match="cannot be read as parquet"):
        read_parquet(tmp_path / "broken.parquet")
