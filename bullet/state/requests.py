"""A request as the scheduler sees it, and the queue of those that wait."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

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
                 "join_tokens", "phase", "preemptions", "prompt_tokens", "queued_s", "slot", "ttft_slo_s")

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

    @property
    def known_tokens(self) -> int:
        """Tokens that a prefill must compute: the prompt, and after a preemption what was generated too."""
        return self.prompt_tokens + self.generated

    def __repr__(self) -> str:
        return (f"Request({self.id}, {self.phase.name}, prompt={self.prompt_tokens}, generated={self.generated}, "
                f"computed={self.computed_tokens})")


class WaitingQueue:
    """Requests not yet admitted, in order of arrival; preempted ones are put in front.

    Columns are kept beside the list, so that a policy can weigh hundreds of requests at once: ``arrival_s``,
    ``ttft_slo_s``, ``known_tokens`` (to prefill), in the order of ``requests``; not to be written to. ``version`` changes with
    every change: results may be cached against it.
    """

    __slots__ = ("arrival_s", "known_tokens", "requests", "ttft_slo_s", "version")

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.arrival_s: list[float] = []
        self.ttft_slo_s: list[float] = []
        self.known_tokens: list[int] = []
        self.version = 0

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __getitem__(self, index: int) -> Request:
        return self.requests[index]

    def append(self, request: Request) -> None:
        """Enqueue a new arrival."""
        self.requests.append(request)
        self.arrival_s.append(request.arrival_s)
        self.ttft_slo_s.append(request.ttft_slo_s)
        self.known_tokens.append(request.known_tokens)
        self.version += 1

    def push_front(self, request: Request) -> None:
        """Enqueue a preempted request ahead of all."""
        self.requests.insert(0, request)
        self.arrival_s.insert(0, request.arrival_s)
        self.ttft_slo_s.insert(0, request.ttft_slo_s)
        self.known_tokens.insert(0, request.known_tokens)
        self.version += 1

    def refresh(self, request: Request) -> None:
        """A waiting request gained a token, from a step that was in flight when it was preempted."""
        self.known_tokens[self.requests.index(request)] = request.known_tokens
        self.version += 1

    def remove(self, request_id: int) -> Request:
        """Take one request out; ``KeyError`` if it does not wait."""
        requests = self.requests
        if requests and requests[0].id == request_id:
            index = 0
        else:
            index = next((i for i, r in enumerate(requests) if r.id == request_id), -1)
            if index < 0:
                raise KeyError(request_id)
        del self.arrival_s[index], self.ttft_slo_s[index], self.known_tokens[index]
        self.version += 1
        return requests.pop(index)
