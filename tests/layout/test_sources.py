"""What every source file obeys, whatever it does: one seam module, one place for the environment, short files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protos", "svc_common", "kernels/day0_kernels", "router_svc", "llm_svc", "vision_svc", "day0")
SERVICES = ("router_svc", "llm_svc", "vision_svc")
SEAMS = Path("llm_svc/adopt/seams.py")
MAX_LINES = 400

# Names that bind something inside transformers, process-wide or for one model.
REGISTERING_CALLS = {"register_patch_mapping", "set_experts_implementation"}
REGISTRIES = {
    "AttentionInterface",
    "AttentionMaskInterface",
    "ExpertsInterface",
    "ALL_EXPERTS_FUNCTIONS",
    "ALL_ATTENTION_FUNCTIONS",
    "ALL_MASK_ATTENTION_FUNCTIONS",
    "AutoConfig",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoTokenizer",
    "AutoImageProcessor",
    "AutoProcessor",
}


def generated(path: Path) -> bool:
    return path.name.endswith(("_pb2.py", "_pb2_grpc.py"))


def written_sources() -> list[Path]:
    """Files a person wrote, relative to the repository."""
    found = [
        path.relative_to(ROOT)
        for folder in (*PACKAGES, "tests", "tools", "benchmarks", "training")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not generated(path)
    ]
    assert len(found) > 30, "the folders have moved; this test would check nothing"
    return found


def product_sources() -> list[Path]:
    return [path for path in written_sources() if path.parts[0] not in ("tests", "tools", "benchmarks", "training")]


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def registrations(source: str) -> list[int]:
    """Lines of a source that register something with transformers, by call or by item assignment."""
    tree = ast.parse(source)
    lines = []
    for call in calls(tree):
        match call.func:
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in REGISTERING_CALLS:
                lines.append(call.lineno)
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr="register"):
                if owner in REGISTRIES:
                    lines.append(call.lineno)
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        lines += [
            target.lineno
            for target in targets
            if isinstance(target, ast.Subscript)
            and isinstance(target.value, ast.Name)
            and target.value.id in REGISTRIES
        ]
    return lines


def environment_uses(source: str) -> list[int]:
    """Lines that read or write the process environment."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "environb" | "getenv" | "putenv" | "unsetenv"):
                lines.append(node.lineno)
            case ast.ImportFrom(module="os", names=names):
                if any(alias.name in ("environ", "environb", "getenv", "putenv", "unsetenv") for alias in names):
                    lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("AttentionInterface.register('x', f)", 1),
        ("masking_utils.AttentionMaskInterface.register('x', f)", 1),
        ("ALL_EXPERTS_FUNCTIONS['x'] = f", 1),
        ("from transformers.monkey_patching import register_patch_mapping\nregister_patch_mapping({})", 1),
        ("model.set_experts_implementation('x')", 1),
        ("registry.register('x', f)", 0),
    ],
)
def test_registrations_are_recognised(source: str, count: int) -> None:
    assert len(registrations(source)) == count


def test_only_the_seam_module_registers_with_transformers() -> None:
    offenders = {
        f"{path}:{line}"
        for path in product_sources()
        if path != SEAMS
        for line in registrations((ROOT / path).read_text())
    }
    assert not offenders
    assert registrations((ROOT / SEAMS).read_text()), f"{SEAMS} registers nothing"


@pytest.mark.parametrize(
    ("source", "count"),
    [("import os\nos.environ['A']", 1), ("os.getenv('A')", 1), ("from os import environ", 1), ("os.cpu_count()", 0)],
)
def test_environment_uses_are_recognised(source: str, count: int) -> None:
    assert len(environment_uses(source)) == count


def test_only_main_modules_touch_the_environment() -> None:
    offenders = {
        f"{path}:{line}"
        for path in product_sources()
        if path.name != "__main__.py"
        for line in environment_uses((ROOT / path).read_text())
    }
    assert not offenders


def test_no_file_is_long() -> None:
    lengths = {path: len((ROOT / path).read_text().splitlines()) for path in written_sources()}
    assert not {str(path): length for path, length in lengths.items() if length > MAX_LINES}


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path)
        for path in written_sources()
        if (ROOT / path).read_text().strip() and ast.get_docstring(ast.parse((ROOT / path).read_text())) is None
    ]
    assert not silent


def test_no_vague_module_names() -> None:
    vague = {"utils.py", "util.py", "common.py", "types.py", "base.py", "helpers.py", "misc.py"}
    assert not [str(path) for path in written_sources() if path.name in vague]


def test_kernels_is_a_plain_folder() -> None:
    """Hugging Face has a package called `kernels`; an `__init__.py` would hide it from transformers."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_services_do_not_import_each_other() -> None:
    offenders = set()
    for path in product_sources():
        own = path.parts[0]
        if own not in SERVICES:
            continue
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names = [node.module]
            offenders |= {f"{path}: {name}" for name in names if name.split(".")[0] in set(SERVICES) - {own}}
    assert not offenders
