"""What the engine tables leave out: small worlds by hand, and the publisher's rows against the tables."""

from __future__ import annotations

import csv
import dataclasses
import shutil

import numpy as np
import pytest

from bullet.catalog.gpus import GPUS, get_gpu
from bullet.catalog.models import MODELS, get_model
from bullet.devices import PROFILES
from bullet.devices.table import FILE as TABLES
from bullet.devices.table import TableDevice, tables_from_rows
from bullet.devices.table_skew import COLUMNS, FILE, SkewedTableDevice, check_skew, read_skew, skew_from_rows
from bullet.errors import ConfigError, ProfileError
from bullet.validation.calibration import calibrate
from bullet.validation.comparison import request_errors
from bullet.validation.recorded import load_recorded
from bullet.validation.replay import Scenario, graph_tokens, replay
from experiments.make_recorded import SKEW, skew_rows
from tests.test_table_device import small_rows

US = 1e-6
TINY = MODELS["tiny"]  # 4 layers
SHIPPED = PROFILES / "rtx4090" / "llama-3.1-8b"


def by_hand():
    """2 sequences: nothing up to 10 tokens beyond, then 1 us a token. 4 sequences: 2 us a token."""
    points = ((2, 10, 20, 50, 50), (2, 10, 40, 50, 70), (4, 10, 20, 50, 70), (4, 10, 40, 50, 110))
    return skew_from_rows([dict(zip(COLUMNS, (n, mean, longest, even * US, seconds * US), strict=True))
                           for n, mean, longest, even, seconds in points], "by hand", "by hand")


def device(**options):
    return SkewedTableDevice(TINY, GPUS["rtx4090"], tables_from_rows(small_rows(), "by hand", "by hand"), **options)


def plain():
    return TableDevice(TINY, GPUS["rtx4090"], tables_from_rows(small_rows(), "by hand", "by hand"))


@pytest.mark.parametrize(("num_seqs", "beyond", "expected_us"), [
    (2, 10, 0), (2, 30, 20), (2, 20, 10),  # halfway between 10 and 30
    (4, 5, 10), (4, 30, 60),  # linear from nothing at the mean
    (3, 30, 40), (3, 20, 25),  # halfway between 2 and 4 sequences
    (1, 500, 0), (2, 0, 0), (300, 0, 0)])  # no longest beyond the mean
def test_the_longest_context_is_read_between_measured_points(num_seqs, beyond, expected_us):
    assert by_hand().seconds(num_seqs, beyond) == pytest.approx(expected_us * US, abs=1e-15)


@pytest.mark.parametrize(("num_seqs", "beyond", "message"), [
    (2, 30.5, "2 decodes of which the longest is 30.5 tokens beyond the mean lie outside what was measured .up to 30 at 2"),
    (3, 31, "up to 30 at 2 sequences"), (5, 10, "up to 4 sequences")])
def test_nothing_is_extrapolated(num_seqs, beyond, message):
    with pytest.raises(ProfileError, match=message):
        by_hand().seconds(num_seqs, beyond)


def test_a_decode_batch_is_priced_by_its_mean_and_its_longest():
    d, tables = device(skew=by_hand()), plain()
    assert d.asks_longest
    assert not tables.asks_longest
    # Contexts of 8 and 48, new tokens included: mean 28, 20 beyond: 10 us in each of 4 layers.
    even = tables.hybrid_work((), 2, 56, logits_seqs=2).seconds
    assert d.hybrid_work((), 2, 56, logits_seqs=2, longest_tokens=48).seconds == pytest.approx(even + 4 * 10 * US)
    assert d.hybrid_work((), 2, 56, logits_seqs=2, longest_tokens=48, layers=2).seconds == pytest.approx(
        tables.hybrid_work((), 2, 56, logits_seqs=2, layers=2).seconds + 2 * 10 * US)
    assert d.hybrid_work((), 2, 56, logits_seqs=2, longest_tokens=28).seconds == even  # equal
    # A piece of one token is a decode: of 48 beside one of 8, the same batch.
    assert d.hybrid_work([(1, 47)], 1, 8, logits_seqs=2, longest_tokens=8).seconds == pytest.approx(even + 4 * 10 * US)
    # With a prompt, and alone: as the tables have it.
    mixed = tables.hybrid_work([(6, 10)], 1, 17, logits_seqs=2).seconds
    assert d.hybrid_work([(6, 10)], 1, 17, logits_seqs=2, longest_tokens=17).seconds == mixed
    assert d.decode_work(1, 20).seconds == tables.decode_work(1, 20).seconds
    assert d.prefill_work([(6, 10)], 4, logits_seqs=1).seconds == tables.prefill_work([(6, 10)], 4, logits_seqs=1).seconds


def test_a_longest_context_that_nobody_says_is_not_guessed():
    with pytest.raises(ConfigError, match="a batch of 2 decodes is priced by its longest context, which was not told"):
        device(skew=by_hand()).decode_work(2, 40)
    with pytest.raises(ProfileError, match="outside what was measured"):
        device(skew=by_hand()).hybrid_work((), 2, 66, logits_seqs=2, longest_tokens=65)


def test_the_factor_is_on_the_tables_up_to_the_largest_graph():
    d, tables = device(skew=by_hand(), graph_factor=0.9, graph_tokens=7, host_gap_s=8 * US), plain()
    even, mixed, more = (tables.hybrid_work(*work, logits_seqs=2).seconds for work in (
        ((), 2, 56), ([(6, 10)], 1, 17), ([(7, 10)], 1, 17)))
    assert d.hybrid_work((), 2, 56, logits_seqs=2, longest_tokens=48).seconds == pytest.approx(0.9 * even + (40 + 8) * US)
    assert d.hybrid_work([(6, 10)], 1, 17, logits_seqs=2, longest_tokens=17).seconds == pytest.approx(0.9 * mixed + 8 * US)
    assert d.hybrid_work([(7, 10)], 1, 17, logits_seqs=2, longest_tokens=17).seconds == pytest.approx(more + 8 * US)
    assert d.prefill_work([(6, 10)], 2, logits_seqs=0).seconds == pytest.approx(
        0.9 * tables.prefill_work([(6, 10)], 2, logits_seqs=0).seconds + 4 * US)  # half of the layers
    assert d.source.endswith("; longest context: by hand; steps of up to 7 tokens x 0.9000")
    for factor in (0.4, 1.6, float("nan")):
        with pytest.raises(ConfigError, match="graph factor"):
            device(graph_factor=factor)


# ------------------------------------------------------------------------------------------- the publisher's rows


def published():
    with SKEW.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_published_times_are_sums_of_three_runs_and_of_the_tables_engine():
    """All n contexts equal, at 48 points that the tables have as well: three times theirs within 4 %, 0.2 % in the median."""
    recorded = load_recorded("rtx4090")
    tables = TableDevice(get_model(recorded.model), get_gpu(recorded.gpu), recorded.tables)
    ratios = [float(r["t_max_us"]) * US / tables.attention_seconds(0, 0, int(r["n"]), int(r["kv_big"])) for r in published()]
    assert len(ratios) == 48
    assert np.abs(np.array(ratios) / 3 - 1).max() < 0.04
    assert np.median(ratios) == pytest.approx(3, rel=0.002)


def test_the_rows_are_as_published():
    """The publisher's alpha, from the three times before it; the mean context, from the others; and what is shipped of them."""
    for r in published():
        mean, longest, skew = (float(r[name]) for name in ("t_mean_us", "t_max_us", "t_skew_us"))
        assert (skew - mean) / (longest - mean) == pytest.approx(float(r["alpha"]), abs=6e-5)
        n, small, big = (int(r[name]) for name in ("n", "kvs", "kv_big"))
        assert int(r["kv_mean"]) == ((n - 1) * small + big) // n
        assert big == 4 * small
    import pyarrow.parquet as pq

    assert pq.read_table(SHIPPED / FILE).equals(skew_rows(SKEW), check_metadata=True)


def test_what_a_longer_context_costs_where_sequences_fill_the_gpu():
    """21 to 28 ns a token and layer for 32 sequences; next to nothing for 4, whose contexts the kernel splits."""
    skew = load_recorded("rtx4090").skew
    assert all(21e-9 < skew.seconds(32, beyond) / beyond < 28e-9 for beyond in range(400, 12_000, 400))
    assert abs(skew.seconds(4, 2304.0) / 2304) < 2e-9


@pytest.mark.parametrize(("changes", "message"), [
    ({"sequences": 1}, "row 1: 1 sequences"), ({"longest_context_tokens": 10}, "a longest beyond the mean"),
    ({"mean_context_tokens": None}, "mean context None"), ({"seconds": float("nan")}, "row 1: seconds = nan"),
    ({"seconds": 50.0}, "row 1: seconds = 50.0: must be between 0 and 1 s"), ({"even_seconds": None}, "even_seconds = None"),
    ({"seconds": 0.05}, "0.05 s unequal but 5e-05 s equal: ten times apart")])
def test_a_row_that_cannot_be_is_refused(changes, message):
    row = dict(zip(COLUMNS, (2, 10, 20, 50e-6, 60e-6), strict=True)) | changes
    with pytest.raises(ProfileError, match=message):
        skew_from_rows([row], "x", "x.parquet")


def test_other_tables_rows_are_refused(tmp_path):
    row = dict(zip(COLUMNS, (2, 16, 20, 33e-6, 34e-6), strict=True))
    with pytest.raises(ProfileError, match=r"row 2: .* are there twice"):
        skew_from_rows([row, row], "x", "x.parquet")
    with pytest.raises(ProfileError, match="needs rows"):
        skew_from_rows([], "x", "x.parquet")
    tables = plain()
    at_16 = tables.attention_seconds(0, 0, 2, 16)
    check_skew([row | {"even_seconds": 1.2 * at_16}], tables, "x.parquet")
    with pytest.raises(ProfileError, match=r"row 1: .* the tables have"):  # three runs' sum, say
        check_skew([row | {"even_seconds": 3 * at_16}], tables, "x.parquet")
    (tmp_path / FILE).write_text("no")
    with pytest.raises(ProfileError, match=f"{FILE}: cannot be read as skew rows"):
        read_skew(tmp_path / FILE, tables)
    for name in ("recorded_requests.parquet", "recorded_run.json", TABLES):
        shutil.copy(SHIPPED / name, tmp_path)
    with pytest.raises(ProfileError, match=f"{FILE}: cannot be read as skew rows"):
        load_recorded("rtx4090", tmp_path)


# ------------------------------------------------------------------------------------------- the graph factor


@pytest.fixture(scope="module")
def recorded():
    return load_recorded("rtx4090")


def happened(recorded, run):
    """A recorded run with a simulated one's outcome."""
    return dataclasses.replace(recorded, queued_s=run.queued_s, first_s=run.first_s, last_s=run.last_s)


def test_the_paged_driver_says_the_longest_context(recorded):
    told = []

    class Listening(SkewedTableDevice):
        def hybrid_work(self, *args, **options):
            told.append(options["longest_tokens"])
            return super().hybrid_work(*args, **options)

    steps = []
    made = Listening(get_model(recorded.model), get_gpu(recorded.gpu), recorded.tables, skew=recorded.skew)
    replay(recorded, device=made, watch=steps.append)
    assert told == [max((past + 1 for _, new, past in step.chunks if new == 1), default=0) for step in steps]
    assert max(told) > 4000


def test_a_factor_comes_back_from_the_first_30_of_a_run_made_with_it(recorded):
    made = happened(recorded, replay(recorded, Scenario("made", skew=True, graph_factor=0.93)))
    found = calibrate(made)
    assert found.factor == pytest.approx(0.93, abs=2e-4)
    assert found.requests == 30
    assert found.standard_error < 1e-3
    # The rest of the outcome plays no part: others as they come, the same factor.
    last = made.last_s.copy()
    last[30:] += 5.0
    assert calibrate(dataclasses.replace(made, last_s=last)).factor == found.factor


@pytest.mark.parametrize("factor", [0.55, 0.8, 1.0, 1.45])
def test_requests_that_never_meet_scale_with_the_factor(recorded, factor):
    """Three requests a minute apart: each decodes alone, so TPOT is the factor times the tables' and nothing else."""
    def cut(values):
        return values[:3].copy()

    alone = dataclasses.replace(recorded, sent_s=np.array([0.0, 60.0, 120.0]), shared={}, **{
        name: cut(getattr(recorded, name)) for name in ("queued_s", "first_s", "last_s", "prompt_tokens", "output_tokens")})
    run = replay(alone)
    tpot = (run.last_s - run.first_s) / (run.output_tokens - 1)
    made = dataclasses.replace(alone, first_s=run.first_s, last_s=run.first_s + factor * tpot * (run.output_tokens - 1))
    found = calibrate(made, 3)
    assert found.factor == pytest.approx(factor, rel=2e-4)
    assert found.standard_error < 1e-4


def test_factors_that_cannot_be_are_refused(recorded):
    with pytest.raises(ConfigError, match="from 1 requests: must be 2 to 300"):
        calibrate(recorded, 1)
    slow = dataclasses.replace(recorded, last_s=recorded.first_s + 3 * (recorded.last_s - recorded.first_s))
    with pytest.raises(ProfileError, match=r"the first 30 requests ask for a graph factor beyond 0.5 to 1.5"):
        calibrate(slow)


def test_graphs_reach_as_far_as_the_engine_captures(recorded):
    def engine(**options):
        return dataclasses.replace(recorded, settings={**recorded.settings, "engine_kwargs": {
            **recorded.settings["engine_kwargs"], **options}})

    assert graph_tokens(recorded) == 512
    assert graph_tokens(engine(max_num_seqs=100)) == 200
    assert graph_tokens(engine(max_num_seqs=1000)) == 512
    assert graph_tokens(engine(max_num_batched_tokens=300)) == 300


def test_single_requests_come_nearer_with_both(recorded):
    """The factor from the first 30, the others judged: half the median error of a request's TPOT."""
    graphs = calibrate(recorded)
    off = [np.median(np.abs(request_errors(recorded, run)["tpot"][30:])) for run in (
        replay(recorded), graphs.one)]
    assert off[1] < 0.6 * off[0]
