"""docs/ and README.md: the worked examples do what the pages say; links lead somewhere; each task is a click from the README."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from bullet.policies import PolicyContext
from bullet.state import (
    DecodeStep,
    HybridStep,
    KvCache,
    Partition,
    PrefillStep,
    Published,
    Request,
    SplitTable,
    SystemState,
    Wait,
)
from docs.make_coefficients import PAGE, with_tables
from docs.make_picture import SYSTEMS, draw
from docs.run_pages import ROOT, differs, pages, part, run

TASKS = ("add-a-policy", "add-a-gpu", "add-a-model", "add-a-trace", "measure-your-gpu", "reproduce-a-figure",
         "what-should-i-deploy")
TEXTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.slow
@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_its_examples_do_what_it_says(page: Path, tmp_path: Path) -> None:
    for _, _, written, found in run(page, tmp_path):
        assert differs(written, found) is None, f"python docs/run_pages.py {page.relative_to(ROOT)} writes it anew"


def test_every_task_has_a_page_that_is_run_and_a_link_from_the_readme() -> None:
    assert {f"{name}.md" for name in TASKS} <= {page.name for page in pages()}
    for text in (ROOT / "README.md", ROOT / "docs" / "README.md"):
        prefix = "docs/" if text.parent == ROOT else ""
        assert [name for name in TASKS if f"]({prefix}{name}.md)" not in text.read_text(encoding="utf-8")] == []


def test_the_readmes_table_is_the_demos() -> None:
    (demo,) = re.findall(r"^DEMO = (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert f"`bullet-sim compare {demo} --no-report --quiet`" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readmes_picture_is_of_steps_of_both_systems() -> None:
    figure = draw()
    shared, own = (sum(len(collection.get_paths()) for collection in axes.collections) for axes in figure.axes)
    assert min(shared, own) > 10
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(SYSTEMS.values())


def test_the_coefficients_page_is_what_the_fits_are() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text, "python docs/make_coefficients.py writes it anew"


def test_the_policys_page_names_all_that_a_policy_sees_and_answers() -> None:
    text = (ROOT / "docs" / "add-a-policy.md").read_text(encoding="utf-8")
    state = SystemState(SplitTable.every(108), KvCache(10), 32, Partition(54, 54))
    transitions = {name for name in dir(SystemState) if re.match(r"arrive|begin|finish|end_|join_|release|check", name)}
    internal = {"place", "slot", "join_iteration", "join_tokens"}
    for seen in ({name for name in dir(state) if not name.startswith("_")} - transitions, set(Request.__slots__) - internal,
                 {field.name for field in dataclasses.fields(PolicyContext)},
                 *(set(step._fields) for step in (PrefillStep, DecodeStep, HybridStep, Wait, Published))):
        assert sorted(name for name in seen if not re.search(rf"`[^`]*\b{name}\b[^`]*`", text)) == []


def test_the_reading_page_names_every_page() -> None:
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    others = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {name for name in others if f"]({name})" not in text} == set()


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.name)
def test_links_lead_somewhere(text: Path) -> None:
    written = re.sub(r"^```.*?^```$", "", text.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = [link for link in re.findall(r'(?:\]\(|src="|srcset="|href=")([^)"#\s]+)', written) if "://" not in link]
    assert [link for link in links if not (text.parent / link).exists()] == []


def test_a_changed_word_number_or_line_is_found() -> None:
    assert differs("bullet  622 ms\n-------\n", "bullet 629 ms\n----\n") is None
    assert differs("a 0.985\n", "a 0.986\n") is None
    assert differs("a 622 b\n", "a 640 b\n") == "'a 622 b' is now 'a 640 b'"
    assert differs("a 622 b\n", "a 622 c\n") == "'a 622 b' is now 'a 622 c'"
    assert differs("a\n", "a\nb\n") == "1 lines are now 2"
    assert part("x\na 1 \nb\nc\n", "a", "b") == "a 1\nb\n"
    with pytest.raises(AssertionError, match="no line holds 'd'"):
        part("x\n", "d", "e")


def test_a_page_whose_command_fails_says_which(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for block, ok in (("<!-- run -->\n```sh\ntrue\nfalse\ntrue\n```", False), ("<!-- fails -->\n```sh\ntrue\n```", False),
                      ("<!-- fails -->\n```sh\necho why >&2; exit 2\n```\n<!-- shows -->\n```\nwhy\n```", True),
                      ("<!-- not run: a reason -->\n```sh\nfalse\n```", True), ("```sh\nfalse\n```", True),
                      ("<!-- of `echo 1` shows -->\n```\n1\n```", True),
                      ("<!-- file: a.py -->\n```python\nprint(1)\n```\n<!-- run -->\n```sh\npython a.py\n```\n"
                       "<!-- shows -->\n```\n1\n```", True)):
        page.write_text(f"{block}\n")
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        if ok:
            assert all(written == found for _, _, written, found in run(page, folder))
        else:
            with pytest.raises(AssertionError, match="status"):
                list(run(page, folder))
