"""The style as a test: sizes, docstrings, names, and that what the documents name is there."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "daemon" / "indexd"
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60
MARK = r"#\s*no" + "qa"
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
TOP_LEVEL = {
    "pyproject.toml", "daemon", "config", "systemd", "tests", "scripts", "README.md", "LICENSE", "ARCHITECTURE.md",
    "CHANGELOG.md", "CONTRIBUTING.md",
}  # fmt: skip


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        return [path for path in ROOT.rglob("*.py") if ".venv" not in path.parts]
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


PYTHON = [path for path in tracked() if path.suffix == ".py"]
MODULES = [path for path in PYTHON if path.is_relative_to(PACKAGE)]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_top_level_holds_nothing_else() -> None:
    names = {path.relative_to(ROOT).parts[0] for path in tracked()}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_sizes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= FILE_LINES_MAX
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            assert lines <= FUNCTION_LINES_MAX, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_what_is_public_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "a module without a docstring"
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_names_and_imports(path: Path) -> None:
    assert not BANNED_NAMES & {part.removesuffix(".py") for part in path.relative_to(ROOT).parts}
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.Import | ast.ImportFrom):
                assert ": PLC0415 - " in lines[inner.lineno - 1], f"line {inner.lineno}: an import without a reason"


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_each_lint_exception_has_its_reason(path: Path) -> None:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if re.search(MARK, line):
            assert re.search(MARK + r": [A-Z0-9, ]+ - \w", line), f"line {number}"


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_paths_that_documents_name_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for name in set(re.findall(r"`((?:daemon|scripts|tests|config|systemd)/[\w./-]*)`", text)):
        assert (ROOT / name).exists(), f"{document} names {name}"


def test_every_module_stands_in_its_packages_map() -> None:
    for package in {path.parent for path in MODULES}:
        words = (package / "__init__.py").read_text(encoding="utf-8")
        for path in package.glob("*.py"):
            if not path.stem.startswith("__"):
                assert re.search(rf"\b{path.stem}\b", words), (
                    f"{name_of(path)} is not in {name_of(package)}/__init__.py"
                )
