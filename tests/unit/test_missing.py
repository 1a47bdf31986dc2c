"""What a machine lacks is skipped with what to do about it, and fails in CI, which installs all of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.missing import PACKAGES, need, need_root, requires

ROOT = Path(__file__).parents[2]
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
