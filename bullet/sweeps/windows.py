"""How much a scheduler leaves: windows of a few requests, and the best schedule found for each with full knowledge.

A window is some consecutive requests of the workload, sent at their own times into an idle device. A *plan* says which prompts
are prefilled together, in which order, and what decode holds meanwhile:

    plan = ((ids, d), (ids, d), ..)     d: decode's SMs while that batch is prefilled; 0: decode waits for it

Prefill has the other SMs, and either lane all of them where the other has nothing to do, at its next launch of
``LAYERS`` layers or its next iteration. A plan is carried out by the ordinary simulator, so its figures are those of any policy.
Plans are looked for with arrivals and output lengths known:

- up to ``EXHAUSTIVE`` requests: every order, every division into batches, and for each batch every d of a few. So nothing that
  is a plan, with these d, does better.
- more: local search (exchange two requests, move one, join or part batches, change a d) from the policies' own schedules, the
  order of arrival and the shortest first. What is found is a *lower* bound of what is possible.

Best is: most requests inside both objectives, then the least mean of TTFT / its SLO. What the policies themselves did counts as
found, so none is ahead of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations, product
from typing import Any, NamedTuple

import numpy as np

from bullet.config import Config, RunConfig, configuration
from bullet.devices.base import Device
from bullet.devices.load import load_device
from bullet.errors import ConfigError, NoProgressError
from bullet.policies.twolane import decode_victims, fits
from bullet.results.columns import RequestTable
from bullet.results.metrics import attained
from bullet.state import DECODE, PREFILL, Decision, DecodeStep, Partition, PrefillStep, SplitTable, Step, SystemState, Wait
from bullet.sweeps.intervals import Estimate, interval, paired
from bullet.workload import Workload, load_workload, stream

MOST_REQUESTS, EXHAUSTIVE = 12, 3
LAYERS = 4
SHARES = (1 / 9, 2 / 9, 1 / 3, 1 / 2, 2 / 3)
"""Of the SMs, what decode may hold beside a prefill; the legal splits nearest to them."""
TRIALS = 300
"""Plans tried for one window."""

Plan = tuple[tuple[tuple[int, ...], int], ...]


class Score(NamedTuple):
    """More is better."""

    met: int
    less_waiting: float

    @property
    def mean_ttft_of_slo(self) -> float:
        """Mean TTFT / its SLO."""
        return -self.less_waiting


class Planned:
    """The policy that carries out a plan. A prompt that lost its blocks comes back before what is left of the plan."""

    lanes: tuple[str, ...] = (PREFILL, DECODE)

    def __init__(self, plan: Plan, num_sms: int) -> None:
        self.left, self.num_sms, self.decode_sms = list(reversed(plan)), num_sms, 0

    def next_step(self, lane: str, state: SystemState, now_s: float) -> Decision:
        """The next layers, or the next iteration."""
        n, d = self.num_sms, self.decode_sms
        if lane == DECODE:
            victims = decode_victims(state)
            if len(victims) == state.decode_seqs or (state.prefill is not None and not d):
                return Wait()
            return DecodeStep(n if state.prefill is None else d, preempt=victims)
        if state.prefill is not None:
            return self._layers(state, d, state.prefill.layers_left)
        waiting = {request.id: request for request in state.queue}
        back = next((request for request in state.queue if request.preemptions), None)
        ids, d = ((back.id,), d) if back is not None else self.left[-1] if self.left else ((), 0)
        taken = 0
        for i in ids:
            if i not in waiting:
                return Wait()
            blocks = state.kv.blocks_to_admit(waiting[i], set())
            if not fits(state, blocks, taken):
                return Wait()
            taken += blocks
        if not ids:
            return Wait()
        if back is None:
            self.left.pop()
        self.decode_sms = d
        return self._layers(state, d, state.num_layers, ids)

    def _layers(self, state: SystemState, d: int, left: int, admit: tuple[int, ...] = ()) -> PrefillStep:
        n = self.num_sms
        return PrefillStep(n - d if state.decode_seqs else n, min(LAYERS, left), admit,
                           target=Partition(n - d, d) if d else Partition(n, n))

    def observe(self, step: Step, elapsed_s: float) -> None:
        """It knows."""


@dataclass(frozen=True)
class Found:
    """One window. ``own``: the policies' scores by name; ``best``: of all that was tried; ``plan``: that does it, ``None`` where
    a policy does; ``exact``: every plan was tried."""

    first: int
    requests: int
    own: dict[str, Score]
    best: Score
    plan: Plan | None
    tried: int
    exact: bool


@dataclass(frozen=True)
class Windows:
    """All windows of one question."""

    config: RunConfig
    policies: tuple[str, ...]
    found: tuple[Found, ...]

    def gap(self, policy: str) -> tuple[Estimate, Estimate]:
        """What the best found is ahead: in attainment, and in mean TTFT / SLO (negative: sooner); means over windows."""
        best = [one.best for one in self.found]
        own = [one.own[policy] for one in self.found]
        counts = [one.requests for one in self.found]
        met, own_met = ([s.met / n for s, n in zip(scores, counts, strict=True)] for scores in (best, own))
        return (paired(met, own_met),
                paired([b.mean_ttft_of_slo for b in best], [o.mean_ttft_of_slo for o in own]))

    def text(self) -> str:
        """A policy a line."""
        first = self.found[0]
        kind = "every plan tried" if all(one.exact for one in self.found) else "best found, a lower bound of what is possible"
        tried = sum(one.tried for one in self.found)
        lines = [f"{len(self.found)} windows of {first.requests} requests into an idle device; {kind} ({tried} plans)",
                 f"{'':<20} {'attainment':>16} {'mean TTFT / SLO':>18} {'best found is ahead':>22} {'TTFT / SLO':>18}"]
        for name in (*self.policies, ""):
            scores = [one.own[name] if name else one.best for one in self.found]
            met = interval([s.met / one.requests for s, one in zip(scores, self.found, strict=True)])
            ttft = interval([s.mean_ttft_of_slo for s in scores])
            line = f"{name or 'best found':<20} {met.text('.3f'):>16} {ttft.text('.3f'):>18}"
            if name:
                ahead, sooner = self.gap(name)
                line += f" {ahead.text('+.3f'):>22} {sooner.text('+.3f'):>18}"
            lines.append(line)
        return "\n".join(lines)


def windows(config: Config, policies: Sequence[str], *, size: int = MOST_REQUESTS, count: int = 8, trials: int = TRIALS,
            workload: Workload | None = None, device: Device | None = None) -> Windows:
    """``count`` windows of ``size`` requests, evenly over the workload of ``config``, which must be long enough for them.
    ``workload``, ``device``: others than it names.

    :class:`ConfigError`: a size that is not 2 to 12, too few requests, prompts that share their beginnings, a closed loop.
    """
    whole = configuration(config)
    if not 2 <= size <= MOST_REQUESTS:
        raise ConfigError(f"--best {size}: must be 2 to {MOST_REQUESTS} requests")
    if not 1 <= count <= 1000:
        raise ConfigError(f"--num-windows {count}: must be 1 to 1,000")
    workload = workload or load_workload(whole.workload, whole.seed)
    if workload.closed is not None or workload.shared_prefix:
        raise ConfigError("--best: needs arrivals at times of their own, and prompts that share nothing")
    if len(workload) < size * count:
        raise ConfigError(f"--best {size}, --num-windows {count}: the workload has {len(workload)} requests, {size * count} are "
                          "needed: --num-requests")
    device = device or load_device(whole.device)
    found = []
    for k in range(count):
        first = k * (len(workload) - size) // max(1, count - 1)
        cut = slice(first, first + size)
        part = dataclasses.replace(workload, arrival_s=workload.arrival_s[cut] - workload.arrival_s[first],
                                   prompt_tokens=workload.prompt_tokens[cut], output_tokens=workload.output_tokens[cut])
        found.append(_Search(whole, part, device, tuple(policies), trials).run(first))
    return Windows(whole, tuple(policies), tuple(found))


class _Search:
    """The plans of one window."""

    def __init__(self, config: RunConfig, workload: Workload, device: Device, policies: tuple[str, ...], trials: int) -> None:
        self.config, self.workload, self.device, self.policies, self.trials = config, workload, device, policies, trials
        legal = SplitTable.every(device.num_sms, config.device.partition_step_sms).decode_sms
        near = {int(legal[int(np.abs(legal - share * device.num_sms).argmin())]) for share in SHARES}
        self.sms = (0, *sorted(near))
        self.scores: dict[Plan, Score] = {}

    def run(self, first: int) -> Found:
        own: dict[str, Score] = {}
        starts: list[Plan] = []
        table: RequestTable | None = None
        for name in self.policies:
            table, tpot_slo_s = self._simulate(dataclasses.replace(self.config.policy, name=name))
            own[name] = _score(table, tpot_slo_s)
            starts += self._plans_of(table)
        assert table is not None, "no policy"
        served = [int(i) for i in table["id"][table["status"] == "finished"]]
        served.sort()
        exact = len(served) <= EXHAUSTIVE
        if exact:
            for plan in _every(served, self.sms):
                self._try(plan)
        else:
            self._climb([*starts, *self._simple(served)])
        best, found = max(own.values()), None
        if self.scores:
            plan = max(self.scores, key=lambda p: (self.scores[p], p))
            if self.scores[plan] > best:
                best, found = self.scores[plan], plan
        return Found(first, len(self.workload), own, best, found, len(self.scores), exact)

    def _simulate(self, policy: Any, planned: Planned | None = None) -> tuple[RequestTable, float]:
        from bullet.sim.run import simulate

        outcome = simulate(dataclasses.replace(self.config, policy=policy), workload=self.workload, device=self.device,
                           policy=planned)
        assert outcome.config.slo.tpot_s is not None
        return outcome.requests, outcome.config.slo.tpot_s

    def _try(self, plan: Plan) -> Score:
        score = self.scores.get(plan)
        if score is None:
            try:
                score = _score(*self._simulate(self.config.policy, Planned(plan, self.device.num_sms)))
            except NoProgressError:  # a batch that the cache cannot hold at once
                score = Score(-1, -np.inf)
            self.scores[plan] = score
        return score

    def _plans_of(self, table: RequestTable) -> list[Plan]:
        """What a policy did, as nearly as a plan can say it: who was admitted together, under each d for all."""
        there = table["status"] == "finished"
        admitted: dict[float, list[int]] = {}
        for i, at in zip(table["id"][there].tolist(), table["admitted_s"][there].tolist(), strict=True):
            admitted.setdefault(at, []).append(int(i))
        batches = [tuple(sorted(admitted[at])) for at in sorted(admitted)]
        return [tuple((ids, d) for ids in batches) for d in self.sms]

    def _simple(self, served: list[int]) -> Iterator[Plan]:
        """One by one, by arrival and the shortest first."""
        shortest = sorted(served, key=lambda i: (int(self.workload.prompt_tokens[i]), i))
        for order in (served, shortest):
            for d in self.sms:
                yield tuple(((i,), d) for i in order)

    def _climb(self, starts: Sequence[Plan]) -> None:
        for plan in dict.fromkeys(starts):
            if len(self.scores) < self.trials:
                self._try(plan)
        random = stream(self.config.seed, "windows")
        at = max(self.scores, key=lambda p: (self.scores[p], p))
        for _ in range(20 * self.trials):
            if len(self.scores) >= self.trials:
                return
            other = _changed(at, self.sms, random)
            if self._try(other) >= self.scores[at]:
                at = other


def _score(table: RequestTable, tpot_slo_s: float) -> Score:
    done = table["status"] == "finished"
    waits = (table["first_token_s"] - table["arrival_s"])[done] / table["ttft_slo_mean_length_s"][done]
    return Score(int(attained(table, "mean_length", tpot_slo_s).sum()), -float(waits.mean()) if len(waits) else -np.inf)


def _every(ids: Sequence[int], sms: Sequence[int]) -> Iterator[Plan]:
    """All plans: orders of requests, divisions into batches, a d for each. Who is in a batch together has no order."""
    seen: set[Plan] = set()
    for order in permutations(ids):
        for cuts in (c for k in range(len(ids)) for c in combinations(range(1, len(ids)), k)):
            edges = (0, *cuts, len(ids))
            batches = tuple(tuple(sorted(order[a:b])) for a, b in pairwise(edges))
            for held in product(sms, repeat=len(batches)):
                plan = tuple(zip(batches, held, strict=True))
                if plan not in seen:
                    seen.add(plan)
                    yield plan


def _changed(plan: Plan, sms: Sequence[int], random: np.random.Generator) -> Plan:
    """One change: two requests exchanged, one moved, two batches joined, one parted, or a d."""
    batches = [list(ids) for ids, _ in plan]
    held = [d for _, d in plan]
    kind, a = int(random.integers(5)), int(random.integers(len(batches)))
    if kind == 0 and len(batches) > 1:
        b = int(random.integers(len(batches)))
        i, j = int(random.integers(len(batches[a]))), int(random.integers(len(batches[b])))
        batches[a][i], batches[b][j] = batches[b][j], batches[a][i]
    elif kind == 1 and len(batches) > 1:
        one = batches[a].pop(int(random.integers(len(batches[a]))))
        d = held[a]
        if not batches[a]:
            del batches[a], held[a]
        to = int(random.integers(len(batches) + 1))
        batches.insert(to, [one])
        held.insert(to, d)
    elif kind == 2 and len(batches) > 1:
        a = min(a, len(batches) - 2)
        batches[a] += batches.pop(a + 1)
        del held[a + 1]
    elif kind == 3 and len(batches[a]) > 1:
        cut = int(random.integers(1, len(batches[a])))
        batches[a:a + 1] = [batches[a][:cut], batches[a][cut:]]
        held.insert(a, held[a])
    else:
        held[a] = int(random.choice(sms))
    return tuple((tuple(sorted(ids)), d) for ids, d in zip(batches, held, strict=True))
