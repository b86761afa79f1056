"""Where kernels ran, kept rather than assumed: the nodes of a captured graph for each operation on each lane.

A graph of one repetition, kept whole by torch (``keep_graph``), is written as the driver's verbose DOT, and read node by node:
kernel names, grids, and the context that each is bound to. Records are appended as gzip members of JSON lines, so that a
file that was cut holds all members before the cut (``zcat`` reads it).

What is wrong in it (:func:`faults`) is said at the end of a sweep: a kernel of another context than its lane's, and copies that
are no kernels inside a layer, of which nobody says that they keep to a set of SMs. What a real driver answers for a context of a
captured node is not known here; where it answers nothing, nothing is judged.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from bullet.errors import ResultsError, one_line

KINDS = {0: "kernel", 1: "memcpy", 2: "memset"}
"""CUgraphNodeType."""


def nodes_of(driver: Any, graph: int) -> list[dict[str, Any]]:
    """Kind of each node of a ``cudaGraph_t``; of kernels the name, grid, block and context (0: the driver does not say)."""
    _, count = driver.call("cuGraphGetNodes", graph, 0)
    nodes, _ = driver.call("cuGraphGetNodes", graph, int(count))
    found = []
    for node in nodes:
        kind = int(driver.call("cuGraphNodeGetType", node))
        entry: dict[str, Any] = {"kind": KINDS.get(kind, str(kind))}
        if kind == 0:
            p = driver.call("cuGraphKernelNodeGetParams", node)
            name = (driver.call("cuFuncGetName", p.func) if int(p.func) else driver.call("cuKernelGetName", p.kern))
            entry |= {"name": name.decode() if isinstance(name, bytes) else str(name),
                      "grid": [int(p.gridDimX), int(p.gridDimY), int(p.gridDimZ)],
                      "block": [int(p.blockDimX), int(p.blockDimY), int(p.blockDimZ)], "context": int(p.ctx)}
        found.append(entry)
    return found


def faults(record: Mapping[str, Any]) -> list[str]:
    """What of one record speaks against its rows, in a line each."""
    nodes, where = record.get("nodes") or [], f"{record['op']} on {record['lane']} of {record['sms']} SMs"
    out = []
    moved = sum(n["kind"] == "memcpy" for n in nodes)
    if moved and record["op"].endswith("_layer"):
        out.append(f"{where}: {moved} memcpy nodes inside the layer")
    contexts = {n["context"] for n in nodes if n["kind"] == "kernel" and n["context"]}
    if len(contexts) > 1:
        out.append(f"{where}: kernels in {len(contexts)} contexts")
    elif contexts and record.get("context") and contexts != {record["context"]}:
        out.append(f"{where}: its kernels are in another context than the lane's")
    return out


class Evidence:
    """Appends records to ``path``; keeps what :func:`faults` finds. ``driver``: :class:`bullet.gpu.driver.Driver`, or None."""

    def __init__(self, path: Path | None, driver: Any = None,
                 within: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """``within``: around each reading, so that a crash in it is known for what it was."""
        self.path, self.driver, self.within = path, driver, within
        self.seen: set[tuple[Any, ...]] = set()
        self.records, self.faults = 0, list[str]()
        self.missing = ""

    def wants(self, key: tuple[Any, ...]) -> bool:
        """Whether this (operation, lane) was not kept yet; asked once."""
        if self.path is None or key in self.seen:
            return False
        self.seen.add(key)
        return True

    def cannot(self, why: object) -> None:
        """Said once, at the end."""
        self.missing = self.missing or one_line(why, 160) or type(why).__name__

    def keep(self, graph: Any, about: Mapping[str, Any], lane_context: Any = None) -> None:
        """One captured ``torch.cuda.CUDAGraph(keep_graph=True)``. What cannot be read is said once and costs no row."""
        assert self.path is not None
        record: dict[str, Any] = {**about, "context": None, "nodes": None, "dot": None}
        try:
            if self.driver is not None:
                if lane_context is not None:
                    record["context"] = int(self.driver.call("cuCtxFromGreenCtx", lane_context))
                record["nodes"] = nodes_of(self.driver, graph.raw_cuda_graph())
        except Exception as exc:  # a binding or driver without the call: the DOT may still be there
            self.cannot(exc)
        try:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "graph.dot"
                graph.debug_dump(str(file))
                record["dot"] = file.read_text(errors="replace")
        except Exception as exc:
            self.cannot(exc)
        self._append(self.path, gzip.compress((json.dumps(record) + "\n").encode()))
        self.records += 1
        self.faults += faults(record)

    def _append(self, path: Path, member: bytes) -> None:
        """Whole or not at all: behind half a member nothing is read."""
        try:
            with path.open("ab", buffering=0) as out:
                whole = os.fstat(out.fileno()).st_size
                try:
                    while member:
                        member = member[out.write(member):]
                except OSError:
                    os.truncate(path, whole)
                    raise
        except OSError as exc:
            raise ResultsError(f"{path}: cannot be written ({exc.strerror}): rows until here are kept") from None

    def lines(self) -> list[str]:
        """For the summary."""
        if self.path is None or not (self.records or self.missing):
            return []
        if not self.records:
            return [f"Where kernels ran is not known: {self.missing}"]
        said = [f"Where kernels ran: {self.records} graphs in {self.path.name}, "
                + (f"{len(self.faults)} faults" if self.faults else "no fault found in them")
                + (f" (not all could be read: {self.missing})" if self.missing else "")]
        return [*said, *(f"  {fault}" for fault in self.faults[:5])]


def read_evidence(path: Path) -> list[dict[str, Any]]:
    """All whole records of a file, one that was cut included, which :mod:`bullet.door` would refuse: for reading by hand, as no
    command does."""
    out, raw = [], path.read_bytes()
    try:
        text = gzip.decompress(raw)
    except (EOFError, OSError):
        text = _members(raw)
    for line in text.splitlines():
        out.append(json.loads(line))
    return out


def _members(raw: bytes) -> bytes:
    """Whole members before a cut."""
    import zlib

    whole = b""
    while raw:
        unpack = zlib.decompressobj(wbits=31)
        try:
            text = unpack.decompress(raw)
        except zlib.error:
            break
        if not unpack.eof:
            break
        whole, raw = whole + text, unpack.unused_data
    return whole


def summary_of(records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Operation -> kernels of one repetition, as the graphs have them."""
    return {r["op"]: sum(n["kind"] == "kernel" for n in r["nodes"]) for r in records if r.get("nodes") is not None}
