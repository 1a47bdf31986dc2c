"""The style as a test, that what the documents name is there, and what a machine lacks: skipped, in CI a failure."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from support.missing import PACKAGES, need, need_root, requires

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "daemon" / "indexd"
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60
MARK = r"#\s*no" + "qa"
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
TOP_LEVEL = {
    "pyproject.toml", "daemon", "config", "systemd", "tests", "scripts", "README.md", "LICENSE", "ARCHITECTURE.md",
    "CHANGELOG.md", "CONTRIBUTING.md", "docs",
}  # fmt: skip


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        return [path for path in ROOT.rglob("*.py") if ".venv" not in path.parts]
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


PYTHON = [path for path in tracked() if path.suffix == ".py"]
MODULES = [path for path in PYTHON if path.is_relative_to(PACKAGE)]
TEXTS = {path: path.read_text(encoding="utf-8") for path in PYTHON}
TREES = {path: ast.parse(text) for path, text in TEXTS.items()}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_top_level_holds_nothing_else() -> None:
    names = {path.relative_to(ROOT).parts[0] for path in tracked()}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL


def test_sizes_of_files() -> None:
    sizes = {name_of(path): text.count("\n") for path, text in TEXTS.items()}
    assert {name: size for name, size in sizes.items() if size > FILE_LINES_MAX} == {}


def test_sizes_of_functions() -> None:
    sizes = {
        f"{name_of(path)}:{node.lineno}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: size for name, size in sizes.items() if size > FUNCTION_LINES_MAX} == {}


def test_every_module_says_what_it_is() -> None:
    assert [name_of(path) for path in MODULES if not ast.get_docstring(TREES[path])] == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    parts = {path: {part.removesuffix(".py") for part in path.relative_to(ROOT).parts} for path in MODULES}
    assert [name_of(path) for path in MODULES if BANNED_NAMES & parts[path]] == []


def test_each_lint_exception_has_its_reason() -> None:
    bare = [
        f"{name_of(path)}:{number}"
        for path, text in TEXTS.items()
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(MARK, line) and not re.search(MARK + r": [A-Z0-9, ]+ - \w", line)
    ]
    assert bare == []


def test_paths_that_documents_name_exist() -> None:
    missing = [
        f"{document} names {name}"
        for document in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", *map(str, (ROOT / "docs").glob("*.md")))
        for name in re.findall(
            r"`((?:daemon|scripts|tests|config|systemd)/[\w./-]*)`", (ROOT / document).read_text(encoding="utf-8")
        )
        if not (ROOT / name).exists()
    ]
    assert missing == []


def test_every_module_stands_in_its_packages_map() -> None:
    maps = {path.parent: TEXTS[path] for path in MODULES if path.stem == "__init__"}
    inner = [path for path in MODULES if not path.stem.startswith("__")]
    assert [name_of(path) for path in inner if not re.search(rf"\b{path.stem}\b", maps[path.parent])] == []


def test_the_container_recipe_copies_what_is_there() -> None:
    recipe = (ROOT / "config" / "container" / "Containerfile").read_text(encoding="utf-8")
    sources = [name for names in re.findall(r"^COPY ([^-].*) \S+$", recipe, re.MULTILINE) for name in names.split()]
    assert {"pyproject.toml", "daemon"} <= set(sources)
    assert [name for name in sources if not (ROOT / name).exists()] == []


CI = (ROOT / ".ci" / "run").read_text("utf-8")
TESTS = {path: path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)}
#: Every Debian has them.
ALWAYS = {"coreutils", "util-linux"}


def test_outside_ci_it_is_skipped_and_in_ci_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for is_ci, outcome, words in (
        ("", pytest.skip.Exception, ""),
        ("true", pytest.fail.Exception, "in CI nothing may "),
    ):
        monkeypatch.setenv("CI", is_ci)
        with pytest.raises(outcome, match=rf"^{words}.*there is no promtool; apt-get install prometheus$"):
            need("promtool")
        with pytest.raises(outcome, match=r"there is no zsh; apt-get install zsh$"):
            bool(requires(lambda: need("zsh")).args[0])
        monkeypatch.setattr("os.geteuid", lambda: 1000)
        with pytest.raises(outcome, match=r"only root may mount an ext4; run this test as root$"):
            need_root("mount an ext4")


def test_what_is_there_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    assert Path(need("sh")).name == "sh"
    assert not requires(lambda: need("sh")).args[0]


def test_nothing_else_skips() -> None:
    # skipif is for modes of a run, which a run asks for.
    others = r"pytest\.skip\(|importorskip|skipif\((?!not JIT\b|any\(mode in)|mark\.skip\("
    found = [path.name for path, text in TESTS.items() if re.search(others, text) and path.name != "missing.py"]
    assert found == []


def test_nothing_is_left_to_a_run_in_ci() -> None:
    asks = [path.name for path, text in TESTS.items() if re.search(r"[\"']CI[\"']", text)]
    assert asks == ["missing.py"]


def test_ci_installs_all_that_tests_need() -> None:
    programs = {name for text in TESTS.values() for name in re.findall(r"\bneed\(\"([\w.-]+)\"\)", text)}
    packages = {PACKAGES.get(name, name) for name in programs}
    packages |= {name for text in TESTS.values() for name in re.findall(r"installing\(['\"]([\w.-]+)['\"]\)", text)}
    assert {"strace", "prometheus", "zsh", "iproute2", "faketime", "maven"} <= packages
    assert {name for name in packages - ALWAYS if not re.search(rf"\b{name}\b", CI)} == set()
