"""What is printed at the end of a sweep, or from its folder: co-run, control and own kernels' tables, in few characters."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bullet.errors import ProfileError, ResultsError
from bullet.files import write_text
from bullet.profiler.plan import CONTROLS
from bullet.profiler.progress import NAME as PROGRESS
from bullet.profiler.progress import Progress, tier_line
from bullet.profiler.shapes import ENGINE_LAYERS, TORCH_LAYERS
from bullet.profiler.sweep import SweepResult
from bullet.profiles.journal import read_journal
from bullet.profiles.rows import ENGINE_OPS, finalise, write_parquet

Row = Mapping[str, Any]
MAX_CHARS = 11_500
"""Of everything printed last: a reader that keeps only the last 12,000 characters sees all of it."""


def _lane_label(row: Row) -> str:
    if row["split_prefill_sms"] is None:
        return f"all {SHARING.get(row['sharing'], row['device_sms'])}"
    mark = {"proven": "", "unproven": "?", "none": ""}[row["partition"]]
    return f"{row['split_prefill_sms']}+{row['split_decode_sms']}{mark}"


def _cell(row: Row | None) -> str:
    if row is None or row["slowdown"] is None:
        return "-"
    return f"{row['slowdown']:.2f}{'~' if row['drift_ok'] is False else ''}"


SHARING = {"priority": "prio", "bounded": "bound"}


def _mean_cell(rows: Sequence[Row]) -> str:
    found = [row for row in rows if row["slowdown"] is not None]
    if not found:
        return "-"
    mean = statistics.fmean(row["slowdown"] for row in found)
    return f"{mean:.2f}{'~' if any(row['drift_ok'] is False for row in found) else ''}"


def corun_lines(rows: Sequence[Row], on: str, layers: tuple[str, str] = TORCH_LAYERS) -> list[str]:
    """Decode's and prefill's slow-down, each over itself alone on the same SMs: a line per (prefill size, split), the mean of
    what was visited more than once.

    ``on``: what the rows were taken on, printed in the title: a simulated or CPU number never reads as a GPU's.
    """
    cells: dict[tuple[int, str, tuple[int, int], str], list[Row]] = {}
    order: dict[tuple[int, str], tuple[Any, ...]] = {}
    decodes: set[tuple[int, int]] = set()
    for row in rows:
        if row["kind"] != "corun" or {row["op"], row["corunner"]} != set(layers) or (row["cublas_sms"] is not None and (
                row["sharing"] == "split")):
            continue
        prefill = row["lane"] == "prefill"
        tokens = row["tokens"] if prefill else row["corunner_tokens"]
        decode = (row["corunner_batch"], row["corunner_context_tokens"]) if prefill else (row["batch"], row["context_tokens"])
        label = _lane_label(row)
        cells.setdefault((tokens, label, decode, row["lane"]), []).append(row)
        order[tokens, label] = (tokens, row["split_decode_sms"] is None, row["split_decode_sms"] or 0, label)
        decodes.add(decode)
    if not cells:
        return []
    columns = sorted(decodes)
    whose = "" if layers == TORCH_LAYERS else " (engine's layers)"
    out = [f"Co-run{whose}, {on}: slow-down of decode / prefill over the same lane alone (~ drifted, ? unproven, all: no split)",
           f"{'prefill':>8} {'SMs p+d':<9}" + "".join(f"{f'b{b} c{c}':>12}" for b, c in columns)]
    for tokens, label in sorted(order, key=lambda key: order[key]):
        line = f"{tokens:>8} {label:<9}"
        for decode in columns:
            pair = [_mean_cell(cells.get((tokens, label, decode, lane), [])) for lane in ("decode", "prefill")]
            line += f"{'/'.join(pair) if pair != ['-', '-'] else '-':>12}"
        out.append(line)
    return out


def control_lines(rows: Sequence[Row], on: str) -> list[str]:
    """Slow-down beside the controls: power, L2, memory, arithmetic or nothing on the other lane."""
    found: dict[tuple[int, str], dict[tuple[str, str], Row]] = {}
    for row in rows:
        if row["kind"] == "control":
            key = (row["split_decode_sms"] or 0, _lane_label(row))
            found.setdefault(key, {})[row["lane"], row["corunner"]] = row
    if not found:
        return []
    columns = [(lane, control) for lane in ("decode", "prefill") for control in CONTROLS
               if any((lane, control) in cells for cells in found.values())]
    out = [f"Controls, {on}: slow-down of a lane beside a control load on the other",
           f"{'SMs p+d':<10}" + "".join(f"{f'{lane[0]}|{control}':>16}" for lane, control in columns)]
    for key in sorted(found):
        out.append(f"{key[1]:<10}" + "".join(f"{_cell(found[key].get(column)):>16}" for column in columns))
    return out


def operation_lines(rows: Sequence[Row], on: str) -> list[str]:
    """Slow-down of single operations beside each other: decode's / prefill's, a column per split."""
    cells: dict[tuple[str, str], dict[str, dict[str, Row]]] = {}
    labels: dict[str, int] = {}
    for row in rows:
        if row["kind"] == "corun" and not {row["op"], row["corunner"]} & {TORCH_LAYERS[0], ENGINE_LAYERS[0]}:
            prefill = row["lane"] == "prefill"
            pair = (row["op"], row["corunner"]) if prefill else (row["corunner"], row["op"])
            label = _lane_label(row)
            labels[label] = row["split_decode_sms"] or 0
            cells.setdefault(pair, {}).setdefault(label, {})[row["lane"]] = row
    if not cells:
        return []
    columns = sorted(labels, key=lambda label: labels[label])
    out = [f"Single operations at once, {on}: slow-down of decode's / prefill's over the same lane alone",
           f"{'prefill | decode':<40}" + "".join(f"{label:>14}" for label in columns)]
    for pair in sorted(cells):
        line = f"{' | '.join(pair):<40}"
        for label in columns:
            found = cells[pair].get(label, {})
            both = [_cell(found.get(lane)) for lane in ("decode", "prefill")]
            line += f"{'/'.join(both) if found else '-':>14}"
        out.append(line)
    return out


TARGETS = {"paged_decode_attention": ("copy bandwidth", 0.7), "own_prefill_attention": ("SDPA's speed", 0.6)}
"""Own kernel -> what its speed is held against, and the share of it that is wanted."""


def own_kernel_lines(rows: Sequence[Row], on: str) -> list[str]:
    """The project's own kernels and its engine's layers beside torch's, alone on the whole device, at the same size:
    microseconds, speed over torch's, least bytes a second over the best copy's. First what both attentions reach of their aims.
    """
    alone: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["kind"] == "solo" and row["sms"] == row["device_sms"] and row["drift_ok"] is not False:
            alone.setdefault((row["op"], row["tokens"], row["batch"], row["context_tokens"]), []).append(row)

    def seconds(key: tuple[Any, ...]) -> float | None:
        return statistics.median(r["median_s"] for r in alone[key]) if key in alone else None

    copy = max((found[0]["bytes"] / s for key, found in alone.items() if ENGINE_OPS.get(key[0], key[0]) == "copy"
                and found[0]["bytes"] and (s := seconds(key))), default=None)
    lines, reached = [], {}
    order = list(ENGINE_OPS)
    for key in sorted((k for k in alone if k[0] in ENGINE_OPS), key=lambda k: (order.index(k[0]), k[1:])):
        own_s, torch_s = seconds(key), seconds((ENGINE_OPS[key[0]], *key[1:]))
        assert own_s is not None
        speed = torch_s / own_s if torch_s is not None else None
        share = alone[key][0]["bytes"] / own_s / copy if copy is not None and alone[key][0]["bytes"] else None
        cells = ["-" if s is None else f"{s * 1e6:.1f}" for s in (own_s, torch_s)] + [
            "-" if r is None else f"{r:.2f}" for r in (speed, share)]
        lines.append(f"{key[0]:<24}{f'{key[1]}x{key[2]}@{key[3]}':>16}" + "".join(f"{c:>11}" for c in cells))
        value = share if key[0] == "paged_decode_attention" else speed
        if key[0] in TARGETS and value is not None:
            reached.setdefault(key[0], {})[f"{key[1]}x{key[2]}@{key[3]}"] = value
    if not lines:
        return []
    targets = []
    for op, (against, wanted) in TARGETS.items():
        if op in reached:
            low, high = (end(reached[op], key=reached[op].__getitem__) for end in (min, max))
            enough = sum(value >= wanted for value in reached[op].values())
            targets.append(f"{op}: {100 * reached[op][high]:.0f} % of {against} at {high}, {100 * reached[op][low]:.0f} % at "
                           f"{low}; {100 * wanted:.0f} % wanted, reached at {enough} of {len(reached[op])} sizes")
    return [*targets, f"Own kernels and layers, {on}: microseconds alone on the whole device, torch's beside them",
            f"{'':<24}{'tokens x seqs':>16}{'own':>11}{'torch':>11}{'own speed':>11}{'of copy':>11}", *lines]


def drift_line(rows: Sequence[Row]) -> str:
    """How steady the run was."""
    drifts = [abs(row["drift"]) for row in rows if row["drift"] is not None]
    if not drifts:
        return "Anchors: none"
    bad = sum(row["drift_ok"] is False for row in rows)
    return f"Anchors: largest drift {100 * max(drifts):.1f} %; {bad} of {len(drifts)} rows beyond the limit"


def fit(fixed: Iterable[str], tables: Iterable[Sequence[str]], limit: int = MAX_CHARS) -> list[str]:
    """``fixed`` lines, shortened (reasons in full are in check.json), then as many table lines as stay under ``limit``
    characters; says how many were left out.
    """
    out = [line[:160] for line in fixed]
    used = sum(len(line) + 1 for line in out)
    pending = [line for table in tables for line in table]
    for at, line in enumerate(pending):
        if used + len(line) + 1 > limit - 60:  # 60: room for the note
            out.append(f".. {len(pending) - at} more lines: see the samples file")
            break
        out.append(line)
        used += len(line) + 1
    return out


def tables(rows: Sequence[Row]) -> list[list[str]]:
    """Control, co-run, own kernels' and operation tables of what was measured last, then those of other models or backends
    that the folder also holds: one cell never stands for two of them.
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["dtype"], row["backend"]), []).append(row)
    out = []
    for (model, _, backend), found in sorted(groups.items(), key=lambda group: group[1][-1] is not rows[-1]):
        gpu = found[0]["gpu"]
        on = {"cpu": "CPU, no partition, lanes alternate: not contention", "simulated": f"SIMULATED {gpu}"}.get(
            backend, f"measured on {gpu}" + (", no partition" if backend == "none" else ""))
        on += f", {model}"
        out += [lines(found, on) for lines in (partial(corun_lines, layers=ENGINE_LAYERS), control_lines, corun_lines,
                                            own_kernel_lines, operation_lines)]
    return out


# ------------------------------------------------------------------------------------------- of a folder


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """As a text file; :class:`ResultsError` if that cannot be."""
    try:
        write_text(path, "\n".join(lines) + "\n")
    except ResultsError as exc:
        raise ResultsError(f"{exc}; rows until here are kept") from None


def _write_samples(out: Path, rows: Sequence[Row], gpu: str, source: str) -> bool:
    """Whether pyarrow is there to write them."""
    try:
        write_parquet(out / "samples.parquet", rows, {"gpu": gpu, "source": source})
    except ImportError:
        return False
    return True


def closing(out: Path, rows: Sequence[Row], result: SweepResult, gpu: str, source: str, verdicts: Sequence[str]) -> list[str]:
    """A sweep's last lines; writes its samples.parquet."""
    where = (f"{out / 'samples.parquet'} and samples.jsonl" if _write_samples(out, rows, gpu, source)
             else f"{out / 'samples.jsonl'} (pyarrow is not installed: no samples.parquet)")
    label = {"measured": "measured on", "simulated": "simulated, not measured:"}[source]
    ended = result.stopped or "plan done" + (f", and {result.beyond} points more in the time left" if result.beyond else "")
    fixed = [f"Sweep: {label} {gpu}; {result.measured} points in {result.elapsed_s:.0f} s, {ended}"
             + (f", {result.left} left: the same command resumes" if result.left else "")]
    fixed += [f"  failed: {key}: {why}"[:200] for key, why in result.failed[:5]]
    if len(result.failed) > 5:
        fixed.append(f"  .. and {len(result.failed) - 5} more failed points")
    return fit([*fixed, f"{len(rows)} rows in {where}", drift_line(rows), *verdicts], tables(rows))


def table(out: Path, *, say: Callable[[str], None]) -> None:
    """What a sweep says and writes last, from its rows alone: for one that was killed before it came to that."""
    header, journal, _ = read_journal(out / "samples.jsonl")
    if not journal:
        raise ProfileError(f"{out / 'samples.jsonl'}: holds no row yet")
    rows = finalise(journal)
    gpu, source = str(header.get("gpu")), str(header.get("source"))
    if not _write_samples(out, rows, gpu, source):
        say("pyarrow is not installed: no samples.parquet")
    proven = {kind: sum(row["partition"] == kind for row in rows) for kind in ("proven", "unproven", "none")}
    progress = Progress(out / PROGRESS)
    whole = [tier_line(progress.tiers)] * bool(progress.tiers)
    lines = fit([f"{len(rows)} rows of {gpu} ({source}): " + ", ".join(f"{n} {kind}" for kind, n in proven.items()), *whole,
                 drift_line(rows)], tables(rows))
    write_lines(out / "summary.txt", lines)
    say("\n".join(lines))
