"""``SOURCE.md`` of a profile: what was fitted on what, whose it is, how wrong it is, and what nothing was measured for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bullet.catalog.gpus import GpuSpec
from bullet.catalog.models import ModelSpec
from bullet.devices.coefficients import DeviceCoefficients
from bullet.door import is_file, read_text
from bullet.errors import ProfileError
from bullet.files import write_text
from bullet.profiles.check import check_samples
from bullet.profiles.kernels import FAMILIES, version_of
from bullet.profiles.rows import ENGINE_OPS, Row

TITLES = {"gemm": "GEMM tiles, bandwidth, overheads", "rowwise": "norm, rotary, activation, embedding",
          "prefill_attention": "prefill attention", "decode_attention": "decode attention",
          "all_reduce": "all-reduce (tensor parallel only)", "bandwidth_against_sms": "bandwidth against SMs",
          "rate_against_sms": "per-SM rate against busy SMs", "contention": "contention loss"}
SM_AXIS = {
    "muxserve": "hao-ai-lab/MuxServe `examples/placement/llama.json`, commit 223148033454e4740f4b4617c72910c370a5604b: llama-7b "
                "steps under MPS shares, checked on 13b. No licence stated: coefficients only, no rows. Compared, not fitted: "
                "AureliusJustin/lithos-reproduction, commit 4d7fb0460efad929711bade1b157cabbb14f120c (a 64 MiB scale under TPC "
                "masks; licence not seen)",
    "greenctx": "simon-mo/green-ctx `data/*_results.csv`, commit 17e4afc0da57c08a77b9c25a852f5068c339ebb9: Llama-3-8B's GEMMs "
                "and attention on 8 to 132 SMs of an H100 in green contexts (2024)."
                " No licence stated: coefficients only, no rows"}
READING = {
    "a100-80gb": """\
Elementwise kernels under 20 us (up to some 500 tokens) are launches and L2 traffic, timed to whole microseconds: their rows
are the bad ones, and sum to under 0.3 ms a step. GEMM shapes left out: without 4096x14336 all others have an inner size of
4,096, where the time that starts a block cannot be told from its rate; and at 4,096 tokens and more the library reaches 207
TFLOPS on 6144x4096, 232 on 28672x4096 and 4096x14336: a difference between shapes that no rate of a tile holds. Prefill
attention under 128 tokens pads its tiles, which the model does not. Two libraries' attention differ by more than either fit
does (the `against` lines); Frontier's is FlashInfer on an A800 (A100's silicon) with llama-2's 32 KV heads. An all-reduce
changes algorithm with size; one line through all of them is rough, and Vidur's are eager launches. A copy kernel draws far
more bandwidth on few SMs than serving's kernels do, hence the curve is fitted on the latter.
""",
    "h100": """\
GEMMs of 28,672 columns or 14,336 inner size are in no table: the family is fitted on the model's other shapes and on those of
the grid that enclose them. Between 65 and 4,352 tokens the library changes tiles often: the P90 is theirs. GEMMs against SMs move
in plateaus (4096 x 6144 lasts the same on 16 and on 32 SMs): the library chooses tiles and clusters for the whole device, and no
smooth curve follows them: hence the 10 % and more of the `sm_axis` lines. Decode attention there (a library of 2024) needs nearly
all SMs for its bandwidth from batches of 32 on, GEMMs of few tokens need half: one curve for all stands between them.
Vidur's all-reduces are eager launches of 30 us: only their slope is used.
""",
    "rtx4090": """\
Elementwise kernels are read from the 72 MB L2 cache, up to three times faster than memory: the model holds every family to the
memory's bandwidth and is 2-3 times too slow for them, some 2 % of a layer at 2,048 tokens. Prefill attention works on tiles of
64 rows and pads them (with both in the model its median error falls to 4 %), where the device takes 128 and does not: chunks
under 512 tokens after a long past come out up to twice too slow or too fast. GEMMs run at the data sheet's peak or up to 0.5 %
above it (boost clocks). For this GPU the tables themselves are the better device.
"""}


MARK = "<!-- From here on written by bullet-profile fit. -->"
"""What stands above it in a SOURCE.md is somebody's own and stays."""
CHANGED = """\
## What was changed
Published values are kept; milliseconds and microseconds became seconds, columns were renamed, rows of other shapes, types and
degrees of parallelism left out, operations and least bytes of each row computed (bullet/profiles/importers/).
"""
LICENCES = """\
## Licences
Apache-2.0: the text is this repository's LICENSE. MIT, for the repositories so marked, copyright their authors:
Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated documentation
files (the "Software"), to deal in the Software without restriction, including without limitation the rights to use, copy,
modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the Software
is furnished to do so, subject to the following conditions: The above copyright notice and this permission notice shall be
included in all copies or substantial portions of the Software. THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND,
EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER
IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER
DEALINGS IN THE SOFTWARE.
"""


WHOSE = {"engine": "the engine's own kernels (its GEMMs are torch's)", "torch": "torch's operations"}
"""``--implementation`` in words."""


def write_page(path: Path, page: str) -> None:
    """Write or replace the part below :data:`MARK`."""
    own = read_text(path, ProfileError).partition(MARK)[0].rstrip() if is_file(path, ProfileError) else ""
    write_text(path, (own + "\n\n" if own else "") + MARK + "\n" + page)


def source_page(coefficients: DeviceCoefficients, rows: Sequence[Row], model: ModelSpec, card: GpuSpec | None = None) -> str:
    """The page. Rows give attribution; notes give the rest."""
    notes, gpu = coefficients.notes, check_samples(rows, card=card)
    sources = notes["fitted_on"]
    lines = [f"# {gpu.name}, {model.name}: where samples.parquet and fit.json come from", "",
             "Written by `bullet-profile import` and `bullet-profile fit`; the same tables give the same bytes. "
             f"{notes['parameters']} parameters.", "Nothing is fitted to serving results, least of all to the paper's.", "",
             "| coefficients | parameters | fitted on | licence |", "|---|---|---|---|"]
    if "implementation" in notes:
        taken = ", ".join(f"{op} from {own}" for op, own in notes["operations"].items())
        lines.insert(4, f"Fitted on the rows of {WHOSE[notes['implementation']]} (`--implementation {notes['implementation']}`)"
                        + (f": {taken}." if taken else "."))
    for family, count in notes["parameters_by_family"].items():
        if family in FAMILIES:
            own = [r for r in rows if ENGINE_OPS.get(r["op"], r["op"]) in FAMILIES[family] and version_of(r) == sources[family]]
            places = sorted({(r["origin"] or r["gpu"], r["licence"] or "this project's") for r in own})
            where, licence = "; ".join(p for p, _ in places), ", ".join(sorted({x for _, x in places}))
            lines.append(f"| {TITLES[family]} | {count} | {sources[family]}: {where} | {licence} |")
        else:
            axis = sources["contention" if family == "contention" else "sm_axis"]
            lines.append(f"| {TITLES[family]} | {count} | {SM_AXIS.get(axis, axis)} | - |")
    lines += ["", "## Rows of samples.parquet", "", "Alone on the whole device unless a row says otherwise.", "",
              "| from | file | licence | rows |", "|---|---|---|---|"]
    counted: dict[tuple[str, str, str], int] = {}
    for r in rows:
        key = (version_of(r), r["origin"] or r["gpu"], r["licence"] or "this project's")
        counted[key] = counted.get(key, 0) + 1
    lines += [f"| {version} | {origin} | {licence} | {count} |" for (version, origin, licence), count in sorted(counted.items())]
    lines += ["", "## Errors", "",
              "Relative, of seconds. *left out*: rows that this fit did not see (every other token count, context or message",
              "size; or a whole GEMM shape). *against*: another source's rows, none of them fitted. The shipped coefficients",
              "are fitted on all rows of their source.", "",
              "| what | rows | median % | P90 % | worst % |", "|---|---|---|---|---|"]
    lines += [f"| {name.replace(':', ', ')} | {e['rows']} | " + " | ".join(
        f"{100 * e[key]:.1f}" for key in ("median", "p90", "worst")) + " |" for name, e in notes["errors"].items()]
    waves = notes["waves"]
    lines += ["", f"Waves: on; evidence is {waves['evidence']} them (median and P90 on rows left out, with and without: "
              + "; ".join(f"{x['with']} and {x['without']}" for x in waves["left_out"]) + ").", ""]
    if gpu.name in READING and any(r["origin"] for r in rows):
        lines += ["Reading them:", READING[gpu.name]]
    lines += ["## No measured row: extrapolated or assumed", *(f"- {text}" for text in notes["assumed"]), ""]
    if any(r["licence"] for r in rows):
        lines += [CHANGED, LICENCES]
    return "\n".join(lines)
