"""ShareGPT: one JSON array of conversations, as text (``[{"conversations": [{"from": .., "value": ..}, ..]}, ..]``).

As vLLM's and SGLang's benchmarks read it, a conversation's first turn is the prompt and its second the output; conversations
of fewer turns are no requests, and counted. Texts have lengths only under a tokenizer, which must be named: no other model's is
assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bullet.config import WorkloadConfig
from bullet.errors import TraceError
from bullet.workload.layout import Layout
from bullet.workload.rows import BATCH_ROWS, Batch, Rows, array_items, text_of_json
from bullet.workload.values import shown

TITLE = "ShareGPT"
HEADER = ["prompt_tokens", "output_tokens"]


def found(path: Path) -> bool:
    """Whether the file's beginning is an array of conversations."""
    with text_of_json(path) as text:
        head = text.read(65536)
    return head.lstrip().startswith("[") and '"conversations"' in head


@contextmanager
def open_document(path: Path, config: WorkloadConfig) -> Iterator[tuple[Rows, Layout]]:
    """The conversations as token counts; :class:`TraceError` without a tokenizer."""
    if config.tokenizer is None:
        raise TraceError(f"{path}: ShareGPT conversations are text: name the model's tokenizer by --tokenizer tokenizer.json "
                         "(workload.tokenizer), or give a trace with token counts (--trace sharegpt)")
    tokenizer = _tokenizer(Path(config.tokenizer))

    def count(text: str, special: bool) -> int:
        return len(tokenizer.encode(text, add_special_tokens=special).ids)

    def batches(columns: Sequence[str]) -> Iterator[Batch]:
        lines: list[int] = []
        short = 0
        counts: list[tuple[int, int]] = []
        for place, item in array_items(path, text):
            turns = item.get("conversations") if isinstance(item, dict) else None
            if not isinstance(turns, list) or not all(isinstance(t, dict) and isinstance(t.get("value"), str) for t in turns[:2]):
                raise TraceError(f"{path}:{place}: {shown(item)}: must be an object with conversations, a list of turns with a "
                                 "value each")
            if len(turns) < 2:
                short += 1
                continue
            lines.append(place)
            counts.append((count(turns[0]["value"], True), count(turns[1]["value"], False)))
            if len(lines) == BATCH_ROWS:
                yield _batch(lines, counts)
                lines, counts = [], []
        if lines:
            yield _batch(lines, counts)
        if short:
            rows.notes.append(f"conversations of fewer than two turns: {short:,} left out")

    with text_of_json(path) as text:
        rows = Rows(str(path), HEADER, batches)
        yield rows, Layout("sharegpt", ("prompt_tokens",), "output_tokens")


def _batch(lines: list[int], counts: list[tuple[int, int]]) -> Batch:
    prompts, outputs = zip(*counts, strict=True)
    return Batch(lines, {"prompt_tokens": prompts, "output_tokens": outputs})


def _tokenizer(path: Path) -> Any:
    """A tokenizer.json, or a folder with one."""
    try:
        from tokenizers import Tokenizer  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise TraceError("--tokenizer: needs the library tokenizers: pip install tokenizers") from None
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as exc:  # the library raises bare Exception
        raise TraceError(f"{file}: not a tokenizer.json ({str(exc).splitlines()[0]})") from None
