"""The cache: what a key is made of, entries that are damaged, two writers; and that all sources of a run are in the digest."""

from __future__ import annotations

import hashlib
import random
import threading
from pathlib import Path

import pytest

from bullet.config import RunConfig, load_run_config
from bullet.errors import ResultsError
from bullet.sweeps import cache as caches
from bullet.sweeps.cache import PACKAGE, Cache, key_of, sources
from docs.make_map import ROOT, read_imports
from tests.test_fuzz_readers import MUTATIONS, mutated


def test_equal_configurations_have_equal_keys_and_any_other_another() -> None:
    base = RunConfig()
    assert key_of(base) == key_of(load_run_config(None, {"workload.rate_req_per_s": 5}))  # the default, spelt out
    others = [load_run_config(None, {key: value}) for key, value in (
        ("seed", 1), ("workload.rate_req_per_s", 5.5), ("policy.name", "naive"), ("policy.options.knob", 1), ("slo.tpot_s", 0.1),
        ("device.gpu", "h100"))]
    assert len({key_of(one) for one in [base, *others]}) == 7


def test_a_named_files_bytes_are_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for key, value, file in (("workload.trace", "./t.csv", "t.csv"), ("policy.name", "p.py:Mine", "p.py"),
                             ("workload.trace", "a.csv@5/60s,b.csv@9/60s", "b.csv"), ("device.timing", "fitted", "fitted/x"),
                             ("device.model", "config.json", "config.json"), ("policy.options.table", "o.csv", "o.csv")):
        config = load_run_config(None, {key: value})
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text("one")
        before = key_of(config)
        assert before == key_of(config)
        Path(file).write_text("two!")
        assert key_of(config) != before, value


def test_code_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(RunConfig())
    monkeypatch.setattr(caches, "code_digest", lambda: "other")
    assert key_of(RunConfig()) != before


def test_all_modules_that_a_run_loads_are_in_the_digest() -> None:
    imports = read_imports(ROOT / "bullet")
    reached, front = {"bullet.sweeps.measure"}, ["bullet.sweeps.measure"]
    while front:
        new = imports[front.pop()] - reached
        reached |= new
        front.extend(new)
    # Policies are loaded by name.
    reached |= {module for module in imports if module.startswith("bullet.policies")}
    have = {".".join(("bullet", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
            for path in sources()}
    assert {"bullet.sim.driver", "bullet.policies.vllm", "bullet.work", "bullet.sweeps.steady"} < reached
    assert reached - have <= {"bullet.version", "bullet.sweeps"}


def test_a_record_comes_back_as_it_went(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "new" / "cache")
    record = {"figures": {"a": 0.1 + 0.2, "b": None, "c": "ü"}, "seconds": 1e-9}
    assert cache.get("ab1") is None
    cache.put("ab1", record)
    assert Cache(cache.folder).get("ab1") == record
    assert [path.name for path in cache.folder.rglob("*") if path.is_file()] == ["ab1.json"]


@pytest.mark.parametrize("harm", [lambda b: b[:-1], lambda b: b"", lambda b: b.replace(b"1.5", b"2.5"), lambda b: b"\xff" + b])
def test_a_damaged_entry_is_none_and_is_told(harm: object, tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put("ab1", {"x": 1.5})
    path = cache.path("ab1")
    path.write_bytes(harm(path.read_bytes()))  # type: ignore[operator]
    assert cache.get("ab1") is None
    assert cache.damaged == [path]
    cache.put("ab1", {"x": 1.5})
    assert cache.get("ab1") == {"x": 1.5}


def test_writers_at_once_leave_a_whole_entry(tmp_path: Path) -> None:
    record = {"x": list(range(20_000))}
    seen: list[object] = []

    def write() -> None:
        mine = Cache(tmp_path)
        for _ in range(10):
            mine.put("ab1", record)
            seen.append(mine.get("ab1"))

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [record] * 40
    assert [path.name for path in (tmp_path / "ab").iterdir()] == ["ab1.json"]


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResultsError, match="file"):
        Cache(tmp_path / "file")


def test_a_damaged_entry_is_never_another_result(tmp_path: Path) -> None:
    """Its checksum is part of it, so that any mutation is found; and one with a sound checksum is an object or nothing."""
    cache = Cache(tmp_path)
    record = {"figures": {"a": 0.5, "b": None}, "seconds": 1.0}
    cache.put("ab1", record)
    path = cache.path("ab1")
    good = path.read_bytes()
    for seed in range(MUTATIONS):
        path.write_bytes(mutated(good, random.Random(seed)))
        assert cache.get("ab1") in (None, record)
    for text in ("[" * 100_000, "[1]", "9" * 6000, '{"a": NaN}', "null"):
        path.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
        assert cache.get("ab1") is None
