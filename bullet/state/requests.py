"""A request as the scheduler sees it, and the queue of those that wait."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from enum import IntEnum
from operator import attrgetter

PREFILL = "prefill"
DECODE = "decode"
HYBRID = "hybrid"


class Phase(IntEnum):
    """Where a request is. READY: prefilled, waiting to merge into the decode batch."""

    WAITING = 0
    PREFILL = 1
    READY = 2
    DECODE = 3
    FINISHED = 4
    REJECTED = 5


class Request:
    """One request as the scheduler sees it; its output length is not known here.

    ``generated``: tokens generated when it last joined or left the decode batch (inside the batch ask
    :meth:`DecodeBatch.generated`). ``computed_tokens``: progress of a chunked prefill. ``first_token_s`` keeps its
    value through preemption.
    """

    __slots__ = ("admitted_s", "arrival_s", "computed_tokens", "first_token_s", "generated", "id", "join_iteration",
                 "join_tokens", "phase", "place", "preemptions", "prompt_tokens", "queued_s", "slot", "ttft_slo_s")

    def __init__(self, id: int, arrival_s: float, prompt_tokens: int, ttft_slo_s: float) -> None:
        self.id = id
        self.arrival_s = arrival_s
        self.prompt_tokens = prompt_tokens
        self.ttft_slo_s = ttft_slo_s
        self.phase = Phase.WAITING
        self.generated = 0
        self.computed_tokens = 0
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.queued_s = arrival_s
        self.preemptions = 0
        self.join_iteration = 0
        self.join_tokens = 0
        self.slot = -1
        self.place = 0  # in the queue: ascending from its front

    @property
    def known_tokens(self) -> int:
        """Tokens that a prefill must compute: the prompt, and after a preemption what was generated too."""
        return self.prompt_tokens + self.generated

    def __repr__(self) -> str:
        return (f"Request({self.id}, {self.phase.name}, prompt={self.prompt_tokens}, generated={self.generated}, "
                f"computed={self.computed_tokens})")


QUEUE_CHANGES_KEPT = 256
"""Changes that a queue remembers: who follows them step by step is seldom further behind."""


class WaitingQueue:
    """Requests not yet admitted, in order of arrival; preempted ones are put in front.

    Columns are kept beside the list, so that a policy can weigh hundreds of requests at once: ``arrival_s``,
    ``ttft_slo_s``, ``known_tokens`` (to prefill), in the order of ``requests``; not to be written to. ``version`` changes with
    every change: results may be cached against it, and brought up to it by the last ``changes``, one for each step of
    ``version``: the request, and whether it came last (1), came first (0), left (-1) or gained a token where it is (2).
    """

    __slots__ = ("_by_id", "arrival_s", "changes", "known_tokens", "requests", "ttft_slo_s", "version")

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.arrival_s: list[float] = []
        self.ttft_slo_s: list[float] = []
        self.known_tokens: list[int] = []
        self.version = 0
        self.changes: deque[tuple[Request, int]] = deque(maxlen=QUEUE_CHANGES_KEPT)
        self._by_id: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __getitem__(self, index: int) -> Request:
        return self.requests[index]

    def append(self, request: Request) -> None:
        """Enqueue a new arrival."""
        requests = self.requests
        request.place = requests[-1].place + 1 if requests else 0
        requests.append(request)
        self.arrival_s.append(request.arrival_s)
        self.ttft_slo_s.append(request.ttft_slo_s)
        self.known_tokens.append(request.known_tokens)
        self._by_id[request.id] = request
        self._changed(request, 1)

    def push_front(self, request: Request) -> None:
        """Enqueue a preempted request ahead of all."""
        requests = self.requests
        request.place = requests[0].place - 1 if requests else 0
        requests.insert(0, request)
        self.arrival_s.insert(0, request.arrival_s)
        self.ttft_slo_s.insert(0, request.ttft_slo_s)
        self.known_tokens.insert(0, request.known_tokens)
        self._by_id[request.id] = request
        self._changed(request, 0)

    def refresh(self, request: Request) -> None:
        """A waiting request gained a token, from a step that was in flight when it was preempted."""
        self.known_tokens[self._index(request)] = request.known_tokens
        self._changed(request, 2)

    def remove(self, request_id: int) -> Request:
        """Take one request out; ``KeyError`` if it does not wait."""
        request = self._by_id.pop(request_id)
        index = self._index(request)
        del self.arrival_s[index], self.ttft_slo_s[index], self.known_tokens[index], self.requests[index]
        self._changed(request, -1)
        return request

    def _index(self, request: Request) -> int:
        if self.requests[0] is request:
            return 0
        return bisect_left(self.requests, request.place, key=_place)

    def _changed(self, request: Request, how: int) -> None:
        self.changes.append((request, how))
        self.version += 1


_place = attrgetter("place")
