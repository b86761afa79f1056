"""SGLang's PD multiplexing: its table of splits, its passes worked out by hand, and files that it cannot read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.errors import ConfigError
from bullet.policies import make_policy
from bullet.policies.base import PolicyContext
from bullet.policies.pdmux import divisions
from bullet.state import SplitTable
from tests import worlds


def build(gpu: str = "a100-80gb", **options: Any) -> Any:
    card = get_gpu(gpu)
    return make_policy("sglang-pdmux", PolicyContext(get_model("llama-3.1-8b"), card, SplitTable.every(card.num_sms), 0.2, None,
                                                     options))


@pytest.mark.parametrize(("sms", "capability", "splits"), [
    # 54 to 92 in steps of 2 are 20; every third of them, six: most prefill SMs first.
    (108, (8, 0), [(84, 24), (78, 30), (72, 36), (66, 42), (60, 48), (54, 54)]),
    # Steps of 8 from 8: 72 to 112, all six.
    (132, (9, 0), [(112, 20), (104, 28), (96, 36), (88, 44), (80, 52), (72, 60)])])
def test_the_engines_own_table(sms: int, capability: tuple[int, int], splits: list[tuple[int, int]]) -> None:
    assert [one[:2] for one in divisions(sms, capability, 6)] == splits


def test_a_batch_takes_its_share_of_the_table() -> None:
    """Number bs x 6 // 36, from 1 to 6."""
    policy = build()
    assert [policy._chosen(batch).decode_sms for batch in (1, 11, 12, 17, 18, 35, 36, 400)] == [24, 24, 30, 30, 36, 48, 54, 54]


def times(long_s: float, **options: Any) -> tuple[dict[int, tuple[float, float]], Any]:
    """Request 0 decodes from 1 ms on; request 1, of 16,384 tokens, comes at 25 ms. ``long_s``: its prefill's seconds."""
    device = worlds.FixedDevice(lambda kind, tokens, sms: (0.001 if tokens < 100 else long_s) if kind == "prefill" else 0.010)
    outcome = worlds.run_with(build(**options), [(0.0, 16, 60), (0.025, 16384, 3)], device=device, device__publish_delay_s=0.0,
                              device__reconfigure_s=0.0)
    names = ("lane", "start_s", "sms", "layers")
    rows = [dict(zip(names, row, strict=True)) for row in zip(*(outcome.steps[name].tolist() for name in names), strict=True)]
    return worlds.times(outcome), {lane: [row for row in rows if row["lane"] == lane] for lane in ("prefill", "decode")}


def test_layers_a_pass_and_the_wait_for_the_next() -> None:
    """Iterations end at 11, 21, 31 ms ... The batch begins with the pass at 31 ms. 65,536 // 16,384 = 4 layers a pass, of 4 ms
    here: the eighth pass is at 101 ms, and the prompt is done 4 ms later, though its kernels are 32 ms."""
    found, steps = times(0.032)
    assert found[1][0] == pytest.approx(0.105)
    passes = steps["prefill"][1:]
    assert [step["layers"] for step in passes] == [4] * 8
    assert [step["start_s"] for step in passes] == pytest.approx([0.031 + 0.01 * k for k in range(8)])
    assert {step["sms"] for step in passes} == {84}


def test_layers_of_later_passes_queue_behind_those_that_run() -> None:
    """20 ms for 4 layers: two passes go by meanwhile, so that from the second launch on all that is left is in the queue in
    time: 160 ms in one go."""
    found, steps = times(0.160)
    assert found[1][0] == pytest.approx(0.031 + 0.160)
    layers = [step["layers"] for step in steps["prefill"][1:]]
    assert sum(layers) == 32
    assert layers[:2] == [4, 8]  # of the pass at 31 ms, of those at 41 and 51 ms


def test_alone_either_has_all_sms_and_the_whole_prompt_is_one_pass_for_few_tokens() -> None:
    _, steps = times(0.032)
    beside = [step["sms"] for step in steps["decode"] if 0.0309 <= step["start_s"] < 0.105]
    alone = [step["sms"] for step in steps["decode"] if not 0.0309 <= step["start_s"] < 0.105]
    assert (set(beside), set(alone)) == ({24}, {108})
    first = steps["prefill"][0]
    assert (first["sms"], first["layers"]) == (108, 32)


def test_divisions_by_hand(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "pdmux.yaml"
    path.write_text("sm_group_num: 4\nmanual_divisions:\n  - [92, 16, 0]\n  - [60, 48, 20]\nsplit_forward_token_budget: 32768\n")
    policy = build(config=str(path))
    assert [policy._chosen(batch).decode_sms for batch in (1, 19, 20, 300)] == [16, 16, 48, 48]
    assert policy._count(16384) == 2


@pytest.mark.parametrize(("text", "message"), [
    ("decode_bs_divisor: 3", "sm_group_num is missing"),
    ("sm_group_num: 2", "sm_group_num = 2: must be 3 or more"),
    ("sm_group_num: four", "sm_group_num = 'four': must be a whole number"),
    ("sm_group_num: 4\nmanual_divisions: [[92, 16, 0]]", "must be 2 entries"),
    ("sm_group_num: 4\nmanual_divisions: [[92, 16, 0], [60, 48]]", "must be [prefill SMs, decode SMs, least decode batch]"),
    ("sm_group_num: 4\nmanual_divisions: [[92, 16, 0], [60, 47, 9]]", "the card cannot grant it: 108 SMs in all, either side 2"),
    ("sm_group_num: 4\nmanual_divisions: [[92, 16, 9], [60, 48, 9]]", "least batches must rise"),
    ("sm_group_num: 3\nmanual_divisions: [[92, 16, 9]]", "the first least batch must be 1 or 0"),
    ("sm_groups: 4", "sm_groups: unknown; a pdmux configuration has sm_group_num"),
    ("[1, 2", "cannot be read as YAML"), ("- 3", "must hold keys")])
def test_a_file_that_cannot_be(text: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "pdmux.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        build(config=str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be 1 or more"):
        build(decode_bs_divisor=0)
    pytest.importorskip("yaml")
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        build(config=str(tmp_path / "none.yaml"))
