"""``sglang-pdmux``: SGLang's PD multiplexing (``srt/multiplex/``: ``pdmux_context.py`` and ``multiplexing_mixin.py``, late 2025).
Prefill and decode on green contexts, whose split is looked up by the size of the decode batch.

**Splits.** Group 0 is prefill on all SMs, the last is decode on all, those between are a table. Without a configuration there are
``sm_group_num - 2`` of them, taken evenly from the partitions the architecture grants with at least half of the SMs for prefill
and 16 for decode (steps of 2 on compute capability 8, of 8 on 9), and a batch of ``bs`` takes number ``bs (groups - 2) //
decode_bs_divisor``, at least the first and at most the last. ``manual_divisions`` of the YAML file (``config``) give [prefill
SMs, decode SMs, least decode batch] instead: the last whose least batch is reached.

**When.** The host makes one pass of its loop a decode iteration, and waits for the iteration to end. In a pass it forms a prefill
batch if there is none, launches the iteration, then the next ``max(1, split_forward_token_budget // tokens of the batch)`` layers
of the prefill, which queue behind those that still run. With nobody decoding it passes again at once. The split is chosen anew
only when a prefill batch begins, when one has ended and joined the decodes, and when the last decode ended: it stands still while
one prefill runs, whatever the batch does.

**Who.** Whole prompts in order of arrival (chunked prefill must be off), up to ``max_prefill_tokens`` a batch, by the rules of
the engine's ``PrefillAdder`` (chunked.py): room for the announced length of newcomers, for a ratio of what is left of those who
run. Decodes are retracted, those with the fewest tokens first, until the next iteration fits.

Left out: tensor parallelism's vote on whether a prefill has ended, the radix cache, attention backends a group. A first token
counts from the end of its prefill; the engine's loop sees it when the iteration beside it has ended.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bullet.door import reason
from bullet.errors import ConfigError
from bullet.policies.base import PolicyContext, read_options, require
from bullet.state import DECODE, PREFILL, Decision, DecodeStep, Partition, PrefillStep, Request, Step, SystemState, Wait

OPTIONS: dict[str, Any] = {
    "config": "",  # the engine's YAML file
    "sm_group_num": 8,
    "split_forward_token_budget": 65536,
    "decode_bs_divisor": 36,
    "max_running_requests": 2048,
    "max_prefill_tokens": 16384,
    "assumed_new_tokens": 512,  # that clients announce
}
FILE_KEYS = ("sm_group_num", "manual_divisions", "split_forward_token_budget", "decode_bs_divisor")
RATIO, LEAST_RATIO, DECAY_STEPS, RETRACT_STEPS = 0.7, 0.098, 600, 20
LEAST_DECODE_SMS = 16


class Division(NamedTuple):
    """A split, and the least decode batch from which it is taken (by hand), or its number (-1)."""

    prefill_sms: int
    decode_sms: int
    least_batch: int


def divisions(num_sms: int, capability: tuple[int, int], groups: int) -> list[Division]:
    """The engine's own table: up to ``groups`` splits, most prefill SMs first."""
    least, step = (8, 8) if capability[0] >= 9 else (4, 2)
    possible = [p for p in range(least, num_sms - least + 1, step) if p >= num_sms - p >= LEAST_DECODE_SMS]
    if not possible:
        raise ConfigError(f"policy sglang-pdmux: {num_sms} SMs have no split with half of them for prefill and "
                          f"{LEAST_DECODE_SMS} for decode")
    if len(possible) >= groups:
        possible = possible[::max(1, len(possible) // groups)][:groups]
    return [Division(p, num_sms - p, -1) for p in reversed(possible)]


def read_config(path: str) -> dict[str, Any]:
    """The keys of a YAML file as the engine reads it; :class:`ConfigError` names what is wrong."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError("policy.options.config: reading YAML needs PyYAML: pip install 'bullet-llm[pdmux]'") from None
    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ConfigError(f"{path}: cannot be read as YAML ({reason(exc)})") from None
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        raise ConfigError(f"{path}: must hold keys of a pdmux configuration: {', '.join(FILE_KEYS)}")
    for key, value in raw.items():
        if key not in FILE_KEYS:
            raise ConfigError(f"{path}: {key}: unknown; a pdmux configuration has {', '.join(FILE_KEYS)}")
        if key != "manual_divisions" and (type(value) is not int or value < 1):
            raise ConfigError(f"{path}: {key} = {value!r}: must be a whole number, 1 or more")
    if "sm_group_num" not in raw:
        raise ConfigError(f"{path}: sm_group_num is missing")
    return raw


def _by_hand(path: str, given: Any, groups: int, context: PolicyContext) -> list[Division]:
    """``manual_divisions`` that the card can grant, least batches rising from one that any batch reaches."""
    if not isinstance(given, list) or len(given) != groups:
        raise ConfigError(f"{path}: manual_divisions: must be {groups} entries, sm_group_num - 2")
    legal = dict(zip(context.splits.decode_sms.tolist(), context.splits.prefill_sms.tolist(), strict=True))
    found: list[Division] = []
    for entry in given:
        if not (isinstance(entry, list) and len(entry) == 3 and all(type(n) is int for n in entry)):
            raise ConfigError(f"{path}: manual_divisions: {entry!r}: must be [prefill SMs, decode SMs, least decode batch]")
        one = Division(*entry)
        if legal.get(one.decode_sms) != one.prefill_sms:
            n = context.splits.num_sms
            raise ConfigError(f"{path}: manual_divisions: {entry!r}: the card cannot grant it: {n} SMs in all, either side "
                              f"{min(legal)} to {max(legal)} in steps of {min(legal)}")
        if found and one.least_batch <= found[-1].least_batch:
            raise ConfigError(f"{path}: manual_divisions: {entry!r}: least batches must rise, it follows {found[-1].least_batch}")
        found.append(one)
    if found[0].least_batch > 1:
        raise ConfigError(f"{path}: manual_divisions: {given[0]!r}: the first least batch must be 1 or 0: a smaller batch would "
                          "have no split")
    return found


class SglangPdmux:
    """See the module's text."""

    lanes: tuple[str, ...] = (PREFILL, DECODE)

    def __init__(self, context: PolicyContext) -> None:
        options = read_options("sglang-pdmux", context.options, OPTIONS)
        manual: Any = None
        path: str = options["config"]
        if path:
            file = read_config(path)
            manual = file.pop("manual_divisions", None)
            options |= file
        for name in OPTIONS:
            if name != "config":
                require(options, name, options[name] >= 1, "1 or more")
        require(options, "sm_group_num", options["sm_group_num"] >= 3, "3 or more: prefill alone, decode alone, and a split")
        self.num_sms = context.splits.num_sms
        groups = options["sm_group_num"] - 2
        if manual:
            self.divisions = _by_hand(path, manual, groups, context)
        else:
            self.divisions = divisions(self.num_sms, context.gpu.compute_capability, groups)
            legal = set(context.splits.decode_sms.tolist())
            for one in self.divisions:
                if one.decode_sms not in legal:
                    raise ConfigError(f"policy sglang-pdmux: its split {one.prefill_sms} + {one.decode_sms} is none that the "
                                      "card's partitions grant (device.partition_step_sms)")
        self.budget: int = options["split_forward_token_budget"]
        self.divisor: int = options["decode_bs_divisor"]
        self.max_running: int = options["max_running_requests"]
        self.max_prefill_tokens: int = options["max_prefill_tokens"]
        self.new_tokens: int = options["assumed_new_tokens"]
        self.ratio = RATIO
        self.split: Division | None = None  # None: a lane alone on all SMs
        self.owed = 0  # layers that a pass launched behind those that still run

    # ---- the two lanes of a pass -----------------------------------------------------------------

    def next_step(self, lane: str, state: SystemState, now_s: float) -> Decision:
        """Prefill is asked first at a boundary, as the pass begins."""
        if lane == DECODE:
            return self._iteration(state, now_s)
        if DECODE in state.in_flight:  # the host waits for the iteration to end; what it launched before runs on
            if state.prefill is None or not self.owed:
                return Wait()
            layers, self.owed = min(self.owed, state.prefill.layers_left), 0
            return self._layers(state, layers)
        running = state.decode.size + len(state.ready)
        if state.prefill is not None:
            layers = min(self.owed + self._count(state.prefill.total_tokens), state.prefill.layers_left)
            self.owed = 0
            if not running:
                self.split = None  # the last decode ended
            elif state.ready or self.split is None:
                self.split = self._chosen(running)
            return self._layers(state, layers)
        admit = self._admit(state)
        if not admit:
            return Wait()
        self.split = self._chosen(running) if running else None
        waiting = {request.id: request for request in state.queue}
        tokens = sum(waiting[i].known_tokens for i in admit)
        self.owed = 0
        return self._layers(state, min(self._count(tokens), state.num_layers), admit)

    def _layers(self, state: SystemState, layers: int, admit: tuple[int, ...] = ()) -> PrefillStep:
        if self.split is None:
            return PrefillStep(self.num_sms, layers, admit, target=Partition(self.num_sms, self.num_sms))
        return PrefillStep(self.split.prefill_sms, layers, admit, target=Partition(self.split.prefill_sms, self.split.decode_sms))

    def _iteration(self, state: SystemState, now_s: float) -> Decision:
        victims = self._retracted(state)
        if len(victims) == state.decode_seqs:
            return Wait(reason="kv-full")
        flight = state.in_flight.get(PREFILL)
        if flight is not None and flight.start_s < now_s and state.prefill is not None:
            assert isinstance(flight.step, PrefillStep)
            left = state.prefill.layers_left - flight.step.layers - self.owed
            self.owed += min(self._count(state.prefill.total_tokens), max(0, left))
        if state.prefill is not None and state.ready:
            self.split = self._chosen(state.decode.size + len(state.ready))
        sms = self.num_sms if state.prefill is None or self.split is None else self.split.decode_sms
        return DecodeStep(sms, preempt=victims, reason="retract" if victims else "")

    # ---- its rules -------------------------------------------------------------------------------

    def _count(self, tokens: int) -> int:
        """Layers a pass."""
        return max(1, self.budget // tokens)

    def _chosen(self, batch: int) -> Division:
        """The split for a decode batch."""
        if self.divisions[0].least_batch >= 0:
            return [one for one in self.divisions if batch >= max(1, one.least_batch) or one is self.divisions[0]][-1]
        number = max(1, min(len(self.divisions), batch * len(self.divisions) // self.divisor))
        return self.divisions[number - 1]

    def _admit(self, state: SystemState) -> tuple[int, ...]:
        """Whole prompts from the front of the queue while tokens and room last."""
        decode, kv = state.decode, state.kv
        running = decode.size + len(state.ready)
        if not running:
            self.ratio = RATIO
        generated = decode.generated_offset + decode.iteration
        left = float(np.maximum(self.new_tokens - generated, 0.0).sum()) + float(
            sum(max(0, self.new_tokens - request.generated) for request in state.ready))
        free = kv.free_blocks * kv.tokens_a_block
        aside, tokens, blocks = self.ratio * left, self.max_prefill_tokens, 0
        admit: list[int] = []
        for request in _by_queueing(state):
            known = request.known_tokens
            alone = not running and not admit  # whatever fits at all is served, or it would wait for ever
            taken = kv.blocks_for(known)
            if running + len(admit) >= self.max_running or blocks + taken > kv.free_blocks:
                break
            if not alone and known + max(self.new_tokens - request.generated, 0) + kv.block_tokens >= free - aside:
                break
            if admit and known >= tokens:
                break
            admit.append(request.id)
            blocks += taken
            tokens -= known
            aside += known + kv.block_tokens + self.new_tokens
            if tokens <= 0 or free <= aside:
                break
        return tuple(admit)

    def _retracted(self, state: SystemState) -> tuple[int, ...]:
        """Who goes so that the next iteration's blocks are free: the fewest tokens made first, of those the longest prompt."""
        decode, kv = state.decode, state.kv
        if state.decode_growth_blocks() <= kv.free_blocks:
            return ()
        there = [*decode.requests.values(), *state.ready]

        def made(request: Request) -> int:
            return decode.generated(request) if request.id in decode.requests else request.generated

        def cached(request: Request) -> int:
            return decode.cached(request) if request.id in decode.requests else request.known_tokens - 1

        ranked = sorted(there, key=lambda r: (-made(r), r.prompt_tokens))
        free, needed, victims = kv.free_blocks, state.decode_growth_blocks(), []
        while ranked and needed > free:
            victim = ranked.pop()
            free += kv.freed(victim, cached(victim))
            needed -= kv.growth(cached(victim))
            victims.append(victim.id)
        announced = self.new_tokens * len(ranked) + 1
        self.ratio = min(1.0, (sum(map(made, ranked)) + RETRACT_STEPS * len(ranked)) / announced)
        return tuple(victims)

    def observe(self, step: Step, elapsed_s: float) -> None:
        """An iteration lowers the ratio."""
        if isinstance(step, DecodeStep) and not step.preempt:
            self.ratio = max(self.ratio - (RATIO - LEAST_RATIO) / DECAY_STEPS, LEAST_RATIO)


def _by_queueing(state: SystemState) -> list[Request]:
    """The queue as the engine keeps it: retracted requests behind those who waited already."""
    return sorted(state.queue.requests, key=lambda request: request.queued_s)
