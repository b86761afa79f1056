"""Random legal transitions of the state, preemption included, against a model that holds a list of tokens a request.

The model knows no counters: a request's cache is a list with one entry a token, its blocks are the entries at positions
divisible by 16, and everything else is a sum or a filter over all requests.
"""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from bullet.state import (
    DECODE,
    PREFILL,
    Chunk,
    DecodeStep,
    HybridStep,
    KvCache,
    Partition,
    Phase,
    PrefillStep,
    Request,
    SplitTable,
    SystemState,
)

BLOCKS = 40
LAYERS = 4


@dataclass
class Model:
    """A request as the model sees it. ``room``: tokens that its blocks must hold."""

    id: int
    prompt: int
    phase: Phase = Phase.WAITING
    made: int = 0
    room: list[int] = field(default_factory=list)
    preemptions: int = 0
    first_s: float | None = None

    @property
    def known(self) -> int:
        return self.prompt + self.made

    @property
    def blocks(self) -> int:
        return len(self.room[::16])


class World:
    """The state and the model side by side; ``draw`` decides."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.state = SystemState(SplitTable.every(108), KvCache(BLOCKS), LAYERS, Partition(108, 108))
        self.now_s = 0.0
        self.made: list[Model] = []
        self.queue: list[Model] = []  # in order of service
        self.ready: list[Model] = []
        self.decode: list[Model] = []
        self.prefill: list[Model] = []
        self.chunked: list[Model] = []
        self.computed: dict[int, int] = {}

    def choose(self, items: list[Model], most: int) -> list[Model]:
        if not items:
            return []
        return self.data.draw(st.lists(st.sampled_from(items), max_size=most, unique_by=id))

    @property
    def free(self) -> int:
        return BLOCKS - sum(m.blocks for m in self.made)

    def arrive(self) -> None:
        m = Model(len(self.made), self.data.draw(st.sampled_from([16, 1, 15, 17, 32, 100])))
        self.made.append(m)
        self.queue.append(m)
        self.state.arrive(Request(m.id, self.now_s, m.prompt, 1.0))

    def admit(self, m: Model) -> None:
        self.queue.remove(m)
        m.phase = Phase.PREFILL
        m.room = [0] * m.known

    def token(self, m: Model) -> None:
        """The token that ends a prefill: made, but not cached."""
        m.made += 1
        if m.first_s is None:
            m.first_s = self.now_s

    def end(self, m: Model) -> None:
        m.phase, m.room = Phase.FINISHED, []

    def preempt(self, victims: list[Model]) -> tuple[int, ...]:
        for m in victims:
            for group in (self.ready, self.decode, self.chunked):
                if m in group:
                    group.remove(m)
            m.phase, m.room, m.preemptions = Phase.WAITING, [], m.preemptions + 1
            self.computed.pop(m.id, None)
            self.queue.insert(0, m)
        return tuple(m.id for m in victims)

    def needed(self, running: list[Model]) -> int:
        """Blocks that one more token each takes."""
        return sum(len(m.room) % 16 == 0 for m in running)

    def check(self) -> None:
        """Everything a policy may read, once more by walking."""
        s, running = self.state, self.decode
        in_flight = 1 if DECODE in s.in_flight else 0
        s.check()
        assert s.kv.free_blocks == self.free
        assert [r.id for r in s.queue] == [m.id for m in self.queue]
        assert s.queue.known_tokens == [m.known for m in self.queue]
        assert [r.id for r in s.ready] == [m.id for m in self.ready]
        assert list(s.decode.requests) == [m.id for m in running]
        assert [r.id for r in s.chunked] == [m.id for m in self.chunked]
        assert {r.id: r.computed_tokens for r in s.chunked} == self.computed
        assert s.decode_seqs == len(running) + len(self.ready)
        for r, m in zip(s.decode.requests.values(), running, strict=True):
            assert (s.decode.cached(r), s.decode.generated(r)) == (len(m.room) - in_flight, m.made)
            assert (r.first_token_s, r.preemptions) == (m.first_s, m.preemptions)
        assert s.decode.cached_tokens == sum(len(m.room) - in_flight for m in running)
        if not in_flight:
            both = running + self.ready
            assert s.decode_context_tokens == sum(len(m.room) + 1 for m in both)
            assert s.decode_growth_blocks() == self.needed(both)
        made = (s.decode.generated_offset + s.decode.iteration).tolist()
        assert sorted(zip(s.decode.first_token_s.tolist(), made, strict=True)) == sorted(
            (m.first_s, m.made) for m in running)

    # ---- two lanes -------------------------------------------------------------------------------

    def prefill_lane(self) -> None:
        s = self.state
        if PREFILL in s.in_flight:
            for r in s.finish_prefill(self.now_s):
                m = self.made[r.id]
                self.token(m)
                # Not cached yet: its room is taken when it is decoded.
                self.prefill.remove(m)
                if self.data.draw(st.booleans()):
                    m.phase = Phase.READY
                    self.ready.append(m)
                else:
                    s.release(r)
                    self.end(m)
            return
        admitted: list[Model] = []
        if s.prefill is None:
            for m in self.choose(self.queue, 3):
                if -(-m.known // 16) <= self.free:
                    self.admit(m)
                    admitted.append(m)
            if not admitted:
                return
            self.prefill = list(admitted)
        left = LAYERS if s.prefill is None else s.prefill.layers_left
        layers = self.data.draw(st.integers(1, left))
        s.begin_prefill(PrefillStep(108, layers, tuple(m.id for m in admitted)), self.now_s)

    def decode_lane(self) -> None:
        s = self.state
        if DECODE in s.in_flight:
            leaving = self.choose(self.decode, 3)
            s.finish_decode([s.decode.requests[m.id] for m in leaving])
            for m in self.decode:
                m.made += 1
            for m in leaving:
                self.decode.remove(m)
                self.end(m)
            return
        victims = self.choose(self.decode + self.ready, 2)
        rest = [m for m in self.decode + self.ready if m not in victims]
        while rest and self.needed(rest) > self.free + sum(m.blocks for m in victims):
            victims.append(rest.pop())
        if not rest:
            return
        s.begin_decode(DecodeStep(108, preempt=self.preempt(victims)), self.now_s)
        self.decode += self.ready
        self.ready = []
        for m in self.decode:
            m.phase = Phase.DECODE
            m.room.append(0)

    # ---- one lane --------------------------------------------------------------------------------

    def hybrid_step(self) -> None:
        """A whole step at once: preempt, chunks, decodes, and who ends."""
        s = self.state
        victims = self.choose(self.decode + self.chunked, 2)
        decodes = [m for m in self.decode if m not in victims]
        with_decode = bool(decodes) and self.data.draw(st.booleans())
        while with_decode and self.needed(decodes) > self.free + sum(m.blocks for m in victims):
            victims.append(decodes.pop())
            with_decode = bool(decodes)
        free = self.free + sum(m.blocks for m in victims) - (self.needed(decodes) if with_decode else 0)
        chunks = [Chunk(m.id, self.data.draw(st.integers(1, m.known - self.computed[m.id])), self.computed[m.id])
                  for m in self.chunked if m not in victims]
        waiting = self.queue[:]
        admitted = []
        for m in waiting[:2]:
            blocks = -(-m.known // 16)
            if blocks <= free:
                free -= blocks
                admitted.append(m)
                chunks.append(Chunk(m.id, self.data.draw(st.integers(1, m.known)), 0))
        if not chunks and not with_decode:
            return
        ids = self.preempt(victims)
        for m in admitted:
            self.admit(m)
            self.chunked.append(m)
            self.computed[m.id] = 0
        s.begin_hybrid(HybridStep(108, tuple(chunks), with_decode, preempt=ids), self.now_s)
        complete = s.finish_hybrid(self.now_s)
        for chunk in chunks:
            self.computed[chunk.request_id] += chunk.new_tokens
        done = [m for m in self.chunked if self.computed[m.id] == m.known]
        assert [r.id for r in complete] == [m.id for m in done]
        if with_decode:
            leaving = self.choose(self.decode, 2)
            s.end_hybrid_decode([s.decode.requests[m.id] for m in leaving])
            for m in self.decode:
                m.room.append(0)
                m.made += 1
            for m in leaving:
                self.decode.remove(m)
                self.end(m)
        for r, m in zip(complete, done, strict=True):
            self.chunked.remove(m)
            del self.computed[m.id]
            self.token(m)
            if self.data.draw(st.booleans()):
                s.join_decode(r)
                m.phase = Phase.DECODE
                self.decode.append(m)
            else:
                s.release(r)
                self.end(m)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_two_lanes(data: st.DataObject) -> None:
    world = World(data)
    for _ in range(data.draw(st.integers(5, 40))):
        world.now_s += 1.0
        data.draw(st.sampled_from([world.arrive, world.prefill_lane, world.decode_lane, world.decode_lane]))()
        world.check()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_one_lane(data: st.DataObject) -> None:
    world = World(data)
    for _ in range(data.draw(st.integers(5, 30))):
        world.now_s += 1.0
        data.draw(st.sampled_from([world.arrive, world.hybrid_step, world.hybrid_step]))()
        world.check()
