"""What the pages name exists: tests, links, make targets, commands, folders, variables; the settings page is fresh."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import typer

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "kernels").rglob("*.md"))
    if ".venv" not in path.parts
)
README = ROOT / "README.md"
CASES = ROOT / "docs" / "cases.md"
# Every case of these sections can arise here and has a test.
CASE_SECTIONS = {
    "A": {1, 3, 4, 6, 8, 9, 10, 11, 13, 15, 16, 17, 19},
    "B": {20, 22, 24, 25, 26, 27, 29, 30, 31, 32, 34, 35},
    "C": {38, 39, 40, 42, 43, 44},
    "F": {64},
}
NODE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
# `--only` and the like belong to the command before them.
COMMAND = re.compile(r"\bday0((?: [a-z]+)+)\b")
FOREIGN_FOLDERS = {"build", "dist"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code_of(page: Path) -> list[str]:
    """What stands in backticks and in fenced blocks."""
    text = page.read_text()
    fenced = re.findall(r"^```.*?$(.*?)^```", text, re.S | re.M)
    return fenced + re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))


@cache
def named_in(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    )


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_are_pages() -> None:
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md"} <= set(map(name_of, PAGES))
    assert len(list((ROOT / "docs" / "adr").glob("*.md"))) >= 10


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or not target.is_relative_to(ROOT) or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_files_exist(page: Path) -> None:
    roots = "protos|svc_common|kernels|router_svc|vision_svc|llm_svc|day0|tests|tools|benchmarks|training|docs"
    named = [
        place
        for code in code_of(page)
        for place in re.findall(rf"(?<![\w/.])((?:{roots})/[\w/.-]*\w(?:\.\w+)?)", code)
        if "YYY" not in place
    ]
    assert not [place for place in named if not (ROOT / place).exists()]


def test_named_tests_exist() -> None:
    nodes = NODE.findall(CASES.read_text())
    assert len(nodes) > 100
    assert not [f"{file}::{test}" for file, test in nodes if not (ROOT / file).exists() or test not in named_in(file)]


def test_every_case_has_a_test() -> None:
    for section, numbers in CASE_SECTIONS.items():
        body = re.search(rf"^## {section}\. .*?(?=^## |\Z)", CASES.read_text(), re.S | re.M)
        assert body is not None
        rows = {int(number): row for number, row in re.findall(r"^\| (\d+) \|(.*)$", body.group(), re.M)}
        assert set(rows) == numbers
        assert not [number for number, row in rows.items() if not NODE.search(row)]


@cache
def commands() -> frozenset[str]:
    """Every command and group of the command line, as `serve` and `bench serve`."""
    from day0.cli import app

    found = set()

    def walk(command: object, path: tuple[str, ...]) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            found.add(" ".join((*path, name)))
            walk(inner, (*path, name))

    walk(typer.main.get_command(app), ())
    return frozenset(found)


def named_commands(code: str) -> set[str]:
    """The longest run of words after `day0` that is at most a group and its command."""
    known = commands()
    named = set()
    for words in COMMAND.findall(code):
        first, *rest = words.split()
        named.add(f"{first} {rest[0]}" if rest and f"{first} {rest[0]}" in known else first)
    return named


def test_unknown_commands_are_recognised() -> None:
    assert named_commands('day0 chat "hi"; day0 fly --far; day0 bench serve; day0 tiny glm5_next D') == {
        "chat",
        "fly",
        "bench serve",
        "tiny",
    }


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_commands_exist(page: Path) -> None:
    named = set().union(*(named_commands(code) for code in code_of(page)), set())
    assert named <= commands()
    if page == README:
        assert {"tiny", "serve", "chat"} <= named


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {
        target
        for code in code_of(page)
        for target in re.findall(r"(?:^|[\s`])make (?:[A-Z]+=\S+ )*([a-z]+)(?=\s|$|`)", code, re.M)
    }
    assert named <= targets
    if page == README:
        assert {"demo", "test"} <= named


def test_named_variables_are_settings() -> None:
    from llm_svc.settings import LlmSettings
    from router_svc.settings import RouterSettings
    from vision_svc.settings import VisionSettings

    known = {
        f"{cls.model_config['env_prefix']}{field.upper()}"
        for cls in (RouterSettings, VisionSettings, LlmSettings)
        for field in cls.model_fields
    }
    prefixes = {f"DAY0_{service}_" for service in ("ROUTER", "VISION", "LLM")}
    for page in PAGES:
        assert set(re.findall(r"DAY0_[A-Z_]+", page.read_text())) <= known | prefixes, page
        for service, field in re.findall(r"--set (router|vision|llm)\.(\w+)=", page.read_text()):
            assert f"DAY0_{service.upper()}_{field.upper()}" in known, page


def folders() -> set[str]:
    return {
        path.name
        for path in ROOT.iterdir()
        if path.is_dir() and not path.name.startswith(".") and not path.name.endswith(".egg-info")
    } - FOREIGN_FOLDERS


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_every_folder_is_explained(page: str) -> None:
    text = (ROOT / page).read_text()
    explained = set(re.findall(r"^\| \[?`(\w+)/`", text, re.M))
    assert explained == folders()


def test_every_decision_has_its_parts() -> None:
    for page in sorted((ROOT / "docs" / "adr").glob("*.md")):
        assert re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", page.name)
        assert re.findall(r"^## (.+)$", page.read_text(), re.M) == ["Context", "Decision", "Consequences"], page.name


def test_settings_page_is_fresh(tmp_path: Path) -> None:
    made = tmp_path / "settings.md"
    command = [sys.executable, str(ROOT / "tools" / "document_settings.py"), "--out", str(made)]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    subprocess.run(command, check=True, timeout=120, env=environment)
    assert made.read_text() == (ROOT / "docs" / "settings.md").read_text(), "run `python tools/document_settings.py`"
