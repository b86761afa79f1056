"""Q in order of service where it is long: the same order and the same answers, at a cost that hardly grows with its length.

queue.py sorts Q anew and sums it up at each decision, which is the quickest way for up to some hundred requests. In a burst of
100,000 it is not. Here the order is kept and repaired:

- Sections: requests in time by (seconds on the present split, arrival), late ones by arrival, overdue ones by arrival. Time
  moves a request on when it is due (two heaps of due times); arrivals and pops are followed by the queue's list of changes.
  Another split may be another order, as seconds do not rise with every token: those in time are sorted anew.
- The repair concerns the head alone: who would be in time by arrival stands within the work that the largest slack allows, and
  can be moved nowhere but there. So the head is written out and repaired as ever, by the same sums.
- An order statistic over Q (P90 of slack or of TTFT / SLO): sections are cut into blocks that know their work and the extremes
  of their columns, which bound each block's values. The few blocks whose bounds straddle the answer are computed.

Sums by blocks round otherwise than a sum from the head does. So every answer has a bound on that error, and a test that
falls within it is made by queue.py's own sum: branches are the same to the bit. The margin that is published is off by less
than the bound.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from operator import itemgetter

import numpy as np

from bullet.policies.bullet.sections import DEADLINE, Block, Floats, Key, Owner, Section, Written, kth_bound, statistic
from bullet.state import Request, WaitingQueue

LONG = 512
"""From this length on Q is kept in sections; below half of it they are dropped."""
MANY = 1024
"""So many requests due at once are sorted anew with all others."""
ULP = 2.0**-53


class LongQueue:
    """Keeps Q's order of service. ``sort`` answers ``None`` where it cannot: then queue.py sorts."""

    def __init__(self, own: Owner) -> None:
        self.own, options = own, own.options
        self.by_arrival: bool = options["order"] == "fcfs"
        self.late_first: bool = options["late_first"]
        self.patience: float = options["late_patience"]
        self.repairs: bool = options["repair"] and options["order"] == "least"
        self.index = own.full  # the split that those in time are sorted for
        self._close: dict[int, tuple[int, bool]] = {}
        self.drop()

    def drop(self) -> None:
        """Q is short again."""
        self.queue: WaitingQueue | None = None
        self.timely, self.late, self.overdue = Section(self.own), Section(self.own), Section(self.own)
        self.where: dict[int, tuple[Section, int]] = {}  # with its place: a request may have come back since, to another
        self.version, self.now_s, self.regular = 0, -math.inf, True
        self._late_at: list[tuple[float, int, Request]] = []
        self._overdue_at: list[tuple[float, int, Request]] = []
        self._filed = self._longest = 0
        self.newest_s = self.longest_slo_s = -math.inf  # no request arrived later, none has a longer one

    # ---- following the queue ---------------------------------------------------------------------

    def sort(self, queue: WaitingQueue, now_s: float, index: int, ahead_s: float) -> LongRanked | None:
        """As :meth:`ServiceOrder.sort`. ``ahead_s``: seconds until P is done."""
        if self.queue is not queue or not self.regular or now_s < self.now_s or not self._catch_up(queue):
            self._rebuild(queue, now_s)
        else:
            self._age(queue, now_s)
        self.now_s = now_s
        if not self.regular or (self.timely.blocks and self._too_close(index)):
            return None
        if index != self.index:
            self.index = index
            self.timely.turn(index)
        front = list(self._front(queue))
        head = front
        if self.repairs and self.timely.blocks:
            head = self._repaired(queue, front, now_s, index, ahead_s)
        return LongRanked(self, queue, front, head, now_s)

    def _catch_up(self, queue: WaitingQueue) -> bool:
        """Follow the changes since; whether that went."""
        behind = queue.version - self.version
        if not 0 <= behind <= len(queue.changes):
            return False
        for i in range(-behind, 0):
            self._follow(*queue.changes[i])
        self.version = queue.version
        return self.regular

    def longest_seen(self, queue: WaitingQueue) -> int | None:
        """Tokens that no request exceeds; ``None`` if this queue is not followed."""
        if self.queue is not queue or not self.regular or not self._catch_up(queue):
            return None
        return self._longest

    def longest_tokens(self, queue: WaitingQueue) -> int:
        """Tokens of the longest; after :meth:`longest_seen` said that it is followed."""
        longest = max((r.known_tokens for r in self._front(queue)), default=0)
        return max(longest, *(section.longest_tokens() for section in self.sections()))

    def sections(self) -> tuple[Section, ...]:
        """In order of service."""
        if self.late_first:
            return self.late, self.timely
        return self.overdue, self.timely, self.late

    @staticmethod
    def _front(queue: WaitingQueue) -> Iterator[Request]:
        """Preempted requests, whose first token is out."""
        for request in queue.requests:
            if request.first_token_s is None:
                return
            yield request

    def _rebuild(self, queue: WaitingQueue, now_s: float) -> None:
        started = sum(1 for _ in self._front(queue))
        rest = queue.requests[started:]
        self.drop()
        self.queue, self.version = queue, queue.version
        self.regular = all(r.first_token_s is None and 0 < r.ttft_slo_s < math.inf for r in rest)
        if not self.regular:
            return
        self._longest = max(queue.known_tokens)
        self.newest_s, self.longest_slo_s = max(queue.arrival_s), max(queue.ttft_slo_s)
        entries: dict[Section, list[tuple[Key, Request]]] = {self.timely: [], self.late: [], self.overdue: []}
        for request in rest:
            section = self._section(request, now_s)
            key = self.key(section, request.place, request)
            entries[section].append((key, request))
            self.where[request.id] = section, request.place
            self._expect(section, request, heap=False)
        for section, found in entries.items():
            section.fill(sorted(found, key=itemgetter(0)))
        heapify(self._late_at)
        heapify(self._overdue_at)

    def _too_close(self, index: int) -> bool:
        """Whether some prompts' seconds differ by so little that the online correction may round them to one."""
        lengths = self.own.lengths
        known = self._close.get(index)
        if known is None or known[0] != lengths:
            seconds = np.sort(self.own.table[:lengths, index])
            gaps = np.diff(seconds)
            known = self._close[index] = lengths, bool(((gaps > 0) & (gaps <= 16 * ULP * seconds[1:])).any())
        return known[1]

    def _section(self, request: Request, now_s: float) -> Section:
        waited_s = now_s - request.arrival_s
        if self.by_arrival:
            return self.late
        if not waited_s > request.ttft_slo_s:
            return self.timely
        if not self.late_first and waited_s > self.patience * request.ttft_slo_s:
            return self.overdue
        return self.late

    def key(self, section: Section, place: int, request: Request) -> Key:
        """Where it stands in a section."""
        if section is self.timely:
            row = self.own.row_for(request.prompt_tokens)  # first: it may make the table anew
            return float(self.own.table[row, self.index]), place
        return place

    def _expect(self, section: Section, request: Request, heap: bool = True) -> None:
        """File a request under the time when it moves on, about."""
        due, at_s = self._late_at, request.arrival_s + request.ttft_slo_s
        if section is self.late:
            due, at_s = self._overdue_at, request.arrival_s + self.patience * request.ttft_slo_s
            if self.late_first or self.by_arrival:
                return
        elif section is self.overdue:
            return
        self._filed += 1
        entry = (at_s, self._filed, request)
        if heap:
            heappush(due, entry)
        else:
            due.append(entry)

    def _follow(self, request: Request, how: int) -> None:
        self._longest = max(self._longest, request.known_tokens)
        self.newest_s, self.longest_slo_s = max(self.newest_s, request.arrival_s), max(self.longest_slo_s, request.ttft_slo_s)
        if how == 1:
            if request.first_token_s is not None or not 0 < request.ttft_slo_s < math.inf:
                self.regular = False
                return
            self._enter(self.late if self.by_arrival else self.timely, request)
        elif how == -1:
            found = self.where.pop(request.id, None)
            if found is not None:
                found[0].remove(self.key(*found, request))
        elif how == 2 or request.first_token_s is None:
            self.regular = False

    def _enter(self, section: Section, request: Request) -> None:
        section.add(self.key(section, request.place, request), request)
        self.where[request.id] = section, request.place
        self._expect(section, request)

    def _age(self, queue: WaitingQueue, now_s: float) -> None:
        """Requests move on that are late, or overdue, by now."""
        moving: list[Request] = []
        for due, section in ((self._late_at, self.timely), (self._overdue_at, self.late)):
            keep: list[tuple[float, int, Request]] = []
            while due and due[0][0] <= now_s + 1e-9 * (1.0 + abs(now_s)):
                entry = heappop(due)
                request = entry[2]
                found = self.where.get(request.id)
                if found is None or found[0] is not section:
                    continue  # it is gone
                if self._section(request, now_s) is section:
                    keep.append(entry)
                else:
                    moving.append(request)
            for entry in keep:
                heappush(due, entry)
        if len(moving) > MANY:
            self._rebuild(queue, now_s)
            return
        for request in moving:
            section, place = self.where[request.id]
            section.remove(self.key(section, place, request))
            self._enter(self._section(request, now_s), request)

    # ---- the repair ------------------------------------------------------------------------------

    def _base(self, front: list[Request]) -> Iterator[Request]:
        yield from front
        for section in self.sections():
            for block in section.blocks:
                yield from block.requests

    def _repaired(self, queue: WaitingQueue, front: list[Request], now_s: float, index: int, ahead_s: float) -> list[Request]:
        """The head of Q after the repair (see :meth:`ServiceOrder._repair`), as far as the repair may change it."""
        own = self.own
        correction = own.estimator.prefill_correction(index)
        most_s = float(self.timely.extremes[1, DEADLINE].max()) - now_s - ahead_s
        most_s += 1e-9 * (1.0 + abs(now_s) + abs(most_s))
        candidates: list[tuple[Request, float, float]] = []  # in time by arrival, in its order; slack and own seconds
        end_s, started = 0.0, len(front)
        for i, request in enumerate(queue.requests):
            own_s = own.alone_at(request.known_tokens, index) * correction
            end_s += own_s
            if end_s > most_s:
                break
            if i >= started:
                slack_s = request.ttft_slo_s - (now_s - request.arrival_s) - ahead_s
                if end_s <= slack_s:
                    candidates.append((request, slack_s, own_s))
        if not candidates:
            return front
        reach_s = max(slack_s for _, slack_s, _ in candidates)
        reach_s += 1e-9 * (1.0 + abs(reach_s))
        order: list[Request] = []
        seconds: list[float] = []
        ends: list[float] = []
        end_s = 0.0
        for request in self._base(front):
            own_s = own.alone_at(request.known_tokens, index) * correction
            end_s += own_s
            if end_s > reach_s and len(order) >= started:
                break
            order.append(request)
            seconds.append(own_s)
            ends.append(end_s)
        within = {request.id for request in order}
        for request, slack_s, own_s in candidates:
            at = order.index(request) if request.id in within else len(order) + 1  # or further back
            if at < len(order) and not ends[at] > slack_s:
                continue
            to = _last_place(ends, at, own_s, slack_s)
            if to is None:
                continue
            if at < len(order):
                del order[at], seconds[at], ends[at]
            order.insert(to, request)
            seconds.insert(to, own_s)
            ends.insert(to, 0.0)
            within.add(request.id)
            end_s = ends[to - 1] if to else 0.0
            for i in range(to, len(order)):
                end_s = ends[i] = end_s + seconds[i]
        return order


def _last_place(ends: list[float], at: int, own_s: float, slack_s: float) -> int | None:
    """The last place before ``at`` where a request of ``own_s`` seconds ends in time; ends ascend, so bisect."""
    def late(to: int) -> bool:
        return (ends[to - 1] if to else 0.0) + own_s > slack_s

    fitting = bisect_left(range(at), True, key=late)
    return fitting - 1 if fitting else None


class LongRanked:
    """Q in order of service: its head written out, then sections without those of the head. Good until the next sort."""

    def __init__(self, kept: LongQueue, queue: WaitingQueue, front: list[Request], head: list[Request], now_s: float) -> None:
        self.kept, self.own, self.queue, self.version = kept, kept.own, queue, queue.version
        self.front, self.head = front, head
        self._waiting = len(queue.requests)
        self.counted = self._waiting - len(front)
        self.sections = kept.sections()
        self._inside = {request.id for request in head}
        self._blocks: list[Block] | None = None
        self._turns: dict[int, tuple[Floats, Floats, float]] = {}
        self._least: dict[int, tuple[float, float, float, float]] = {}  # see _at_least
        self._exact: Written | None = None

    def __iter__(self) -> Iterator[Request]:
        """In order of service."""
        inside = self._inside
        yield from self.head
        for section in self.sections:
            for block in section.blocks:
                for request in block.requests:
                    if request.id not in inside:
                        yield request

    def exact(self) -> Written:
        """The same, written out."""
        if self._exact is None:
            self._exact = self.own.written_out(self.version, list(self), len(self.front))
        return self._exact

    # ---- order statistics ------------------------------------------------------------------------

    def _prepare(self) -> list[Block]:
        """Blocks in order of service; those that lost requests to the head are made anew, and noted."""
        if self._blocks is None:
            rest = self.head[len(self.front) :]
            alone = [section for section in self.sections if section.blocks]
            if len(alone) == 1 and not rest:  # late ones alone: as deep overload has it
                self.sections, self._extremes, self._counts = (alone[0],), alone[0].extremes, alone[0].counts
                self._blocks, self._places, self._offset = alone[0].blocks, {}, 0
                return self._blocks
            blocks = [self.sections[0].make([], rest)] if rest else []
            places = {0: blocks[0]} if rest else {}
            held = [(*self.kept.where[r.id], r) for r in rest]
            touched = {(id(section), section.find(self.kept.key(section, place, r))) for section, place, r in held}
            for section in self.sections:
                for b, block in enumerate(section.blocks):
                    if touched and (id(section), b) in touched:
                        block = places[len(blocks)] = block.without(self._inside)
                    blocks.append(block)
            self._blocks, self._places, self._offset = blocks, places, 1 if rest else 0
            pad = self._offset
            self._extremes = np.concatenate([np.zeros((2, 4, pad)), *(s.extremes for s in self.sections)], axis=2)
            self._counts = np.concatenate([np.zeros(pad), *(s.counts for s in self.sections)])
            for b, block in places.items():
                self._counts[b] = len(block.requests)
                if block.requests:
                    self._extremes[:, :, b] = block.extremes()
        return self._blocks

    def _starts(self, index: int) -> tuple[Floats, Floats, float]:
        """When each block's turn comes and when it ends, uncorrected seconds; and a bound on their rounding."""
        if index in self._turns:
            return self._turns[index]
        front_rows = [self.own.row_for(r.known_tokens) for r in self.front]
        table = self.own.table
        if len(self.sections) == 1 and not self._offset:
            sums = self.sections[0].sums(index)
        else:
            sums = np.concatenate([np.zeros(self._offset), *(s.sums(index) for s in self.sections)])
        for b, block in self._places.items():
            sums[b] = table[block.rows, index].sum()
        first_s = float(table[front_rows, index].sum()) if front_rows else 0.0
        ends = first_s + sums.cumsum()
        starts = np.concatenate(([first_s], ends[:-1]))
        error = (4 * self._waiting + 64) * ULP * (float(ends[-1]) if len(ends) else first_s)
        self._turns[index] = starts, ends, error
        return starts, ends, error

    def _ends_within(self, b: int, index: int, start_s: float) -> Floats:
        ends: Floats = start_s + self.own.table[self._prepare()[b].rows, index].cumsum()
        return ends

    def missed(self, index: int, now_s: float) -> bool:
        """Whether P90 of TTFT misses its SLO under one split."""
        return self._margin(index, now_s, value=False) < 0

    def margin(self, index: int, now_s: float) -> float:
        """Seconds to spare under one split, P90."""
        return self._margin(index, now_s, value=True)

    def _margin(self, index: int, now_s: float, value: bool) -> float:
        """Seconds to spare; its sign is right, its size too if a ``value`` is asked for."""
        if not self.counted:
            return math.inf
        blocks = self._prepare()
        correction = self.own.estimator.prefill_correction(index)
        starts, ends, error = self._starts(index)
        deadlines = self._extremes[:, DEADLINE]
        error = error * correction + 8 * ULP * (abs(now_s) + float(np.abs(deadlines).max()))
        low, high = deadlines[0] - ends * correction - error, deadlines[1] - starts * correction + error

        def within(b: int) -> Floats:
            slacks: Floats = blocks[b].columns[DEADLINE] - self._ends_within(b, index, float(starts[b])) * correction
            return slacks

        found = statistic(self._counts, low, high, self.counted // 10, within, None if value else now_s)
        margin_s = found - now_s
        return self.exact().margin(index, now_s) if abs(margin_s) <= 2 * error else margin_s

    def _at_least(self, here_s: float, now_s: float, correction: float, others: int) -> float:
        """A bound under P90 of TTFT / SLO, on whichever split: in deep overload it answers all that is asked of this order.

        From the bound with each prompt on its fastest split: a ratio falls by no more than the correction's share, and by what
        the service begins earlier.
        """
        if others not in self._least:
            self._prepare()
            starts, _, error = self._starts(-1)
            (_, _, least, _), (_, last, most, _) = self._extremes
            if not len(starts) or now_s < last.max():
                return -math.inf
            low = (here_s + starts * correction - last - error * correction - 8 * ULP * abs(here_s)) / most
            n = self.counted + others
            k = n - n // 10 - 1 - others  # as if all the others were less
            bound = kth_bound(self._counts, low, k) if k >= 0 else -math.inf
            self._least[others] = here_s, correction, bound, float(least.min())
        since_s, then, bound, shortest_s = self._least[others]
        bound *= min(1.0, correction / then) if bound > 0 else 1.0
        return (bound - max(0.0, since_s - here_s) / shortest_s) * (1 - 1e-9)

    def exceeds(self, ratio: float, index: int, now_s: float, ahead_s: float, others: int = 0) -> bool:
        """Whether P90 of TTFT / SLO is more than ``ratio`` whatever ``others`` there are, as far as a bound tells at once."""
        here_s = now_s + ahead_s
        if here_s - self.kept.newest_s > ratio * self.kept.longest_slo_s * (1 + 1e-9) and self.counted > 9 * others:
            return True  # all of Q have waited for longer than that
        return ratio < self._at_least(here_s, now_s, self.own.estimator.prefill_correction(index), others)

    def reaches(self, ratio: float, index: int, now_s: float, ahead_s: float, others: Sequence[float] = ()) -> bool:
        """Whether P90 of TTFT / SLO over Q, served after ``ahead_s`` seconds, and ``others`` is ``ratio`` or more."""
        here_s = now_s + ahead_s
        correction = self.own.estimator.prefill_correction(index)
        if ratio < self._at_least(here_s, now_s, correction, len(others)):
            return True
        blocks = self._prepare()
        starts, ends, error = self._starts(index)
        (_, first, least, _), (_, last, most, _) = self._extremes
        error = error * correction + 8 * ULP * (abs(here_s) + abs(now_s))
        low, high = here_s + starts * correction - last - error, here_s + ends * correction - first + error
        low, high = np.minimum(low / least, low / most), np.maximum(high / least, high / most)
        n = self.counted + len(others)
        if not n:
            return ratio <= 0.0

        def within(b: int) -> Floats:
            if b >= len(blocks):
                return np.array([others[b - len(blocks)]])
            _, arrival_s, slo_s, _ = blocks[b].columns
            ratios: Floats = (here_s + self._ends_within(b, index, float(starts[b])) * correction - arrival_s) / slo_s
            return ratios

        counts = self._counts
        if len(others):
            counts = np.concatenate((counts, np.ones(len(others))))
            low, high = np.concatenate((low, others)), np.concatenate((high, others))
        found = statistic(counts, low, high, n - n // 10 - 1, within, ratio)
        if math.isinf(found):
            return found > 0
        shortest = least[self._counts > 0]
        error = 2 * error / float(shortest.min()) if len(shortest) else 0.0
        if abs(found - ratio) <= error + 8 * ULP * (abs(found) + abs(ratio)):
            return self.exact().reaches(ratio, index, now_s, ahead_s, others)
        return found >= ratio
