"""A sweep of a CPU to a profile: the engine's steps as they were measured, interpolated (:mod:`bullet.devices.measured`).

The form that a GPU's rows are fitted to (shares of a data sheet's peaks, waves of thread blocks, bandwidth against SMs,
contention) does not describe a CPU: it has no SMs and no second lane, and what it takes for a step is for the most part torch's
way to its kernels. So nothing is fitted. Rows of whole steps (:data:`bullet.profiles.rows.ENGINE_PHASES`) become ``steps.json``,
which a simulation takes as ``--device-model DIR``; rows of single layers tell how much of a step they explain.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bullet.catalog.models import ModelSpec, model_label
from bullet.devices.measured import TURNS, StepProfile, along
from bullet.errors import ProfileError
from bullet.profiles.rows import ENGINE_PHASES, Row

CPU_BACKEND = "cpu"
WHOLE, BY_LAYER, ITERATION = ENGINE_PHASES
Shape = tuple[int, int, int]
"""New tokens, sequences, context of each."""


def is_cpu(rows: Sequence[Row]) -> bool:
    """Whether a sweep was one of a CPU."""
    return bool(rows) and all(row["backend"] == CPU_BACKEND for row in rows)


def alone(rows: Sequence[Row], op: str) -> dict[Shape, float]:
    """Seconds alone on all threads. Drifted rows too: a shared CPU drifts all the time, and the page says how much."""
    found: dict[Shape, list[float]] = {}
    for row in rows:
        if row["op"] == op and row["kind"] == "solo" and row["sms"] == row["device_sms"]:
            found.setdefault((row["tokens"], row["batch"], row["context_tokens"]), []).append(row["median_s"])
    return {shape: statistics.median(seconds) for shape, seconds in sorted(found.items())}


def profile_of(rows: Sequence[Row], model: ModelSpec) -> StepProfile:
    """Step times from rows; :class:`ProfileError` says which are too few.

    A launch: what a prefill in one launch a layer takes more than at once, by the launches that are more. A query-key pair:
    what a prefill after a past takes more than one without, by the pairs that are more.
    """
    prefills, by_layer, iterations = (alone(rows, op) for op in ENGINE_PHASES)
    first = {tokens: s for (tokens, batch, past), s in prefills.items() if batch == 1 and past == 0}
    batches = sorted({batch for _, batch, _ in iterations})
    contexts = sorted({context for _, _, context in iterations})
    batches = [b for b in batches if all((b, b, c) in iterations for c in contexts)]
    split = {shape: s for shape, s in by_layer.items() if shape in prefills}
    head = alone(rows, "gemm_lm_head").get((1, 1, 0))
    for what, have, need in ((f"sizes of {WHOLE} without a past", len(first), 2), (f"batches of {ITERATION}", len(batches), 2),
                             (f"contexts of {ITERATION}", len(contexts), 2),
                             (f"sizes of {BY_LAYER} that {WHOLE} has too", len(split), 1),
                             ("rows of gemm_lm_head of one token", int(head is not None), 1)):
        if have < need:
            raise ProfileError(f"step times: {have} {what}, at least {need} needed: sweep the CPU again, with more --budget-s")
    tokens = sorted(first)
    pairs = [max(0.0, s - along(n, tokens, [first[t] for t in tokens])) / (n * past)
             for (n, batch, past), s in prefills.items() if batch == 1 and past > 0]
    launches = [(s - prefills[shape]) / max(1, model.num_layers - 1) for shape, s in split.items()]
    n = int(rows[0]["device_sms"])
    assert head is not None
    return StepProfile(
        hardware=str(rows[0]["gpu"]), partition=TURNS, model=model_label(model), num_sms=n, turns=True,
        prefill_tokens=tuple(tokens), prefill_s=tuple(first[t] for t in tokens), batches=tuple(batches), contexts=tuple(contexts),
        decode_s=tuple(tuple(iterations[b, b, c] for c in contexts) for b in batches),
        launch_s=max(0.0, statistics.median(launches)), head_s=head, pair_s=statistics.median(pairs) if pairs else 0.0,
        prefill_sms=((n, 1.0),), decode_sms=((n, 1.0),))


def explained(rows: Sequence[Row], profile: StepProfile, model: ModelSpec) -> list[tuple[str, Shape, float, float]]:
    """(step, shape, its layers' seconds, its own): where both were measured."""
    found = []
    for op, layer in ((WHOLE, "engine_prefill_layer"), (ITERATION, "engine_decode_layer")):
        steps = alone(rows, op)
        for shape, seconds in alone(rows, layer).items():
            if shape in steps:
                found.append((op, shape, model.num_layers * seconds + profile.head_s, steps[shape]))
    return found


def page(rows: Sequence[Row], profile: StepProfile, model: ModelSpec) -> str:
    """``SOURCE.md``: what the numbers are, on what they rest, and what they are not."""
    own = [r for r in rows if r["op"] in ENGINE_PHASES]
    drift = max((abs(r["drift"]) for r in own if r["drift"] is not None), default=None)
    spread = statistics.median((r["p80_s"] - r["p20_s"]) / r["median_s"] for r in own if r["p80_s"] is not None)
    lines = [f"# {profile.hardware}, {profile.model}: where steps.json comes from", "",
             f"Measured: {len(own)} rows of whole steps of the engine, {rows[0]['dtype']}, torch {rows[0]['torch']}, on "
             f"{rows[0]['device_sms']} thread(s) ({TURNS}).", "",
             "Written by `bullet-profile fit` from a sweep of a CPU. A CPU has no SMs and no partition, so no coefficients",
             "are fitted: the form of a GPU's fit (shares of a data sheet's peaks, waves, bandwidth against SMs, contention)",
             "does not describe it. The rows are interpolated. They are no times of a GPU and say nothing of one.", "",
             f"The middle half of a row's samples lies within {100 * spread:.0f} % of its median (in the median)"
             + (f"; the machine drifted by up to {100 * drift:.0f} % over the sweep (anchors)." if drift is not None else "."),
             f"A launch costs {profile.launch_s * 1e6:.0f} us, the LM head {profile.head_s * 1e6:.0f} us, a query-key pair "
             f"{profile.pair_s * 1e9:.2f} ns.", ""]
    both = explained(rows, profile, model)
    if both:
        lines += ["A step's layers alone (layers x a layer's row + LM head) against the step; the rest is the host's work, and "
                  "what the caches hold.", "",
                  "| step | tokens x sequences @ context | layers ms | step ms | layers' share |", "|---|---|---|---|---|"]
        lines += [f"| {op} | {t}x{b}@{c} | {1e3 * parts:.2f} | {1e3 * whole:.2f} | {100 * parts / whole:.0f} % |"
                  for op, (t, b, c), parts, whole in both]
    return "\n".join(lines) + "\n"
