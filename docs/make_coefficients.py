"""The tables of docs/coefficients.md, from the shipped fits themselves: ``python docs/make_coefficients.py`` writes them anew.

tests/test_pages.py holds the page to what this makes, so that no coefficient changes without its line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "coefficients.md"
MARKS = ("<!-- tables: python docs/make_coefficients.py -->\n", "<!-- end of tables -->\n")
CARDS = ("a100-80gb", "h100", "rtx4090")

ROWS = (  # coefficient, what it is, the family that it is fitted in, unit or share
    ("gemm_tiles", "GEMM: share of peak operations by tile, least to most", "gemm", ""),
    ("gemm_bandwidth", "GEMM: share of the data sheet's bandwidth", "gemm", ""),
    ("gemm_overhead_s", "GEMM: beside its work", "gemm", "us"),
    ("gemm_block_overhead_s", "GEMM: a block, beside its work", "gemm", "us"),
    ("prefill_attention_efficiency", "prefill attention: share of peak", "prefill_attention", ""),
    ("prefill_attention_extra_keys", "prefill attention: keys a query row costs beyond its own", "prefill_attention", "keys"),
    ("prefill_attention_overhead_s", "prefill attention: beside its work", "prefill_attention", "us"),
    ("decode_attention_bandwidth", "decode attention: share of bandwidth", "decode_attention", ""),
    ("decode_attention_overhead_s", "decode attention: beside its work", "decode_attention", "us"),
    ("decode_attention_seq_s", "decode attention: a sequence, however short", "decode_attention", "us"),
    ("rowwise_bandwidth", "norm, rotary, activation, embedding: share of bandwidth", "rowwise", ""),
    ("rowwise_overhead_s", "the same: beside their work", "rowwise", "us"),
    ("rate_slope", "rate of an SM as others idle: slope", "sm_axis", ""),
    ("rate_cap", "the same: at most, times", "sm_axis", ""),
    ("bandwidth_knee", "bandwidth against SMs: knee, share of the SMs", "sm_axis", ""),
    ("bandwidth_sharpness", "the same: sharpness", "sm_axis", ""),
    ("link_efficiency", "all-reduce: share of the link", "all_reduce", ""),
    ("all_reduce_overhead_s", "all-reduce: beside its bytes", "all_reduce", "us"),
    ("contention_loss", "co-running: what the other's share of bandwidth costs", "contention", ""),
    ("host_gap_s", "host, a step", "host", "us"),
)
ERRORS = (("gemm_left_out:all", "GEMM, token counts left out"), ("prefill_attention_left_out", "prefill attention"),
          ("decode_attention_left_out", "decode attention"), ("all_reduce_left_out", "all-reduce"))


def fit_of(card: str) -> dict[str, Any]:
    """A shipped fit.json."""
    fit: dict[str, Any] = json.loads((ROOT / "profiles" / card / "llama-3.1-8b" / "fit.json").read_text(encoding="utf-8"))
    return fit


def _value(value: Any, unit: str) -> str:
    if isinstance(value, list):
        value = [share for *_, share in value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return f"{min(value):.2f} to {max(value):.2f}"
    if unit == "us":
        return f"{1e6 * value:.2g} us"
    return f"{value:.3g}" + (f" {unit}" if unit else "")


def _kind(fit: dict[str, Any], name: str, family: str) -> str:
    """What a coefficient rests on: the source it is fitted on; else whose it is, or that it is assumed."""
    notes = fit["notes"]
    if name in ("contention_loss", "host_gap_s") and family not in notes["fitted_on"]:
        return "*assumed*"
    for line in notes["assumed"]:
        what = line.partition(":")[0]
        if "A100's" in line and what in (name, family, "rate and bandwidth against SMs" if family == "sm_axis" else family):
            return "A100's, *assumed*"
    return f"fitted: {notes['fitted_on'][family]}"


def tables() -> str:
    """Coefficients by card, then errors on rows left out."""
    fits = {card: fit_of(card) for card in CARDS}
    lines = ["| | " + " | ".join(CARDS) + " |", "|---|" + "---|" * len(CARDS)]
    for name, what, family, unit in ROWS:
        cells = (f"{_value(fit[name], unit)}<br>{_kind(fit, name, family)}" for fit in fits.values())
        lines.append(f"| {what}<br>`{name}` | " + " | ".join(cells) + " |")
    lines += ["", "Errors on rows that the fit has not seen, median / P90 / worst %:", "",
              "| | " + " | ".join(CARDS) + " |", "|---|" + "---|" * len(CARDS)]
    for key, what in ERRORS:
        found = [fit["notes"]["errors"].get(key) for fit in fits.values()]
        lines.append(f"| {what} | " + " | ".join(
            "not measured" if e is None else " / ".join(f"{100 * e[k]:.{digits}f}" for k, digits in
                                                        (("median", 1), ("p90", 1), ("worst", 0))) for e in found) + " |")
    return "\n".join(lines) + "\n"


def with_tables(text: str) -> str:
    """The page with its tables as the fits are."""
    before, rest = text.split(MARKS[0])
    return before + MARKS[0] + tables() + MARKS[1] + rest.split(MARKS[1])[1]


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
