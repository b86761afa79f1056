"""Names, and a user's own file. Unknown names and imports are in test_rivals.py."""

from pathlib import Path

import pytest

from bullet.errors import ConfigError
from bullet.policies import POLICIES, check_name, chunked, describe, needs_estimator, static, vllm
from bullet.policies.bullet import algorithm as bullet
from tests.policies.loops import build


@pytest.mark.parametrize(("name", "kind"), [
    ("bullet-literal", "BulletLiteral"), ("bullet-partition", "BulletPartition"), ("bullet-scheduler", "BulletScheduler"),
    ("sglang-pdmux", "SglangPdmux"), ("muxwise", "Muxwise"), ("static-2", "Static"), ("static-106", "Static"), ("naive", "Naive"),
    ("sglang-1", "Sglang"), ("sglang", "SglangWhole"), ("sglang-2048-mixed", "SglangMixed"), ("vllm-256", "Vllm")])
def test_names_are_checked_before_anything_is_built(name: str, kind: str) -> None:
    check_name(name)
    if not needs_estimator(name):
        assert type(build(name)).__name__ == kind


@pytest.mark.parametrize("name", ["", "static-", "static--2", "sglang-1.5", "sglang-1024-", "vllm-1024 ", "VLLM-1024", "static-N",
                                  "sglang-²"])
def test_near_misses_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown policy"):
        check_name(name)


def test_one_line_a_family() -> None:
    for _, text in describe():
        assert text
        assert "\n" not in text
    assert {name for name, entry in POLICIES.items() if entry.estimator} == {
        "bullet", "bullet-literal", "bullet-partition", "bullet-scheduler", "bullet-plus", "muxwise"}


WHOLE = """
class Mine:
    lanes = ("hybrid",)
    def __init__(self, context):
        self.sms = context.splits.num_sms
    def next_step(self, lane, state, now_s): ...
    def observe(self, step, elapsed_s): ...
"""


def refused(tmp_path: Path, text: str, name: str = "Mine") -> str:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        check_name(f"{path}:{name}")
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_a_users_own_is_loaded_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(WHOLE)
    assert needs_estimator(f"{path}:Mine")
    assert build(f"{path}:Mine").sms == 108
    path.write_text(WHOLE.replace("context.splits.num_sms", "1"))
    assert build(f"{path}:Mine").sms == 1, "a changed file is read again"


def test_a_users_mistakes_are_one_line(tmp_path: Path) -> None:
    assert "SyntaxError while loading" in refused(tmp_path, "def oops(:\n  pass")
    assert "SystemExit while loading: 3" in refused(tmp_path, "import sys\nsys.exit(3)")
    assert "ValueError while loading: two lines" in refused(tmp_path, "raise ValueError('two\\nlines')")
    assert "ModuleNotFoundError" in refused(tmp_path, "import no_such_module_here")
    assert "no class 'Other'; it defines: Mine" in refused(tmp_path, WHOLE, "Other")
    assert "no class 'Mine'; it defines: none" in refused(tmp_path, "Mine = 3")
    assert "lacks next_step and observe" in refused(tmp_path, "class Mine:\n    lanes = ('hybrid',)")
    assert "lacks observe" in refused(tmp_path, WHOLE.replace("observe", "watch"))


def test_what_shows_only_when_it_is_built(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(WHOLE.replace("lanes =", "roads ="))
    with pytest.raises(ConfigError, match="is not a policy: it needs lanes"):
        build(f"{path}:Mine")
    path.write_text(WHOLE.replace("context.splits", "context.nothing"))
    with pytest.raises(ConfigError, match="could not be built: AttributeError"):
        build(f"{path}:Mine")


@pytest.mark.parametrize("module", [bullet, chunked, static, vllm])
def test_every_option_is_documented(module: object) -> None:
    text = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
    assert [name for name in module.OPTIONS if f"`{name}" not in text] == []  # type: ignore[attr-defined]
