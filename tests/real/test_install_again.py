"""scripts/install where somebody was before: edited files, another prefix or user, links that lead out, Pythons."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.staged import ETC, files, install, staged


def test_the_user_stays_until_another_is_given(tmp_path: Path) -> None:
    root = tmp_path / "root"
    drop_in = root / ETC / "indexd.service.d/local.conf"
    staged(root, "--store", "/data/one", "--user", "rocketmq")
    assert "rocketmq, as before" in staged(root, "--store", "/data/two")
    lines = drop_in.read_text("utf-8").splitlines()
    assert {"User=rocketmq", 'RequiresMountsFor="/data/two"'} <= set(lines)
    assert "as before" not in staged(root, "--store", "/data/two", "--user", "indexd")
    assert "User=" not in drop_in.read_text("utf-8")
    assert "as before" not in staged(root, "--store", "/data/two")


@pytest.mark.parametrize("edited", ["etc/indexd/indexd.toml", ETC / "indexd.service.d/local.conf"])
def test_one_of_two_files_is_not_changed_to_another_store(tmp_path: Path, edited: Path | str) -> None:
    root = tmp_path / "root"
    staged(root, "--store", "/s1")
    with (root / edited).open("a") as file:
        file.write("# mine\n")
    before = files(root)
    for store in ("/s2", "/s"):
        done = install("--root", root, "--no-program", "--store", store)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
        assert f"{root / edited} was edited" in done.stderr
        assert files(root) == before
    staged(root, "--store", "/s1")
    (root / edited).write_text((root / edited).read_text("utf-8").replace("/s1", "/s2"), "utf-8")
    staged(root, "--store", "/s2")
    assert [path for path, content in files(root).items() if b"/s1" in content and "installed" not in path] == []


def test_it_is_taken_away_from_where_it_was_put(tmp_path: Path) -> None:
    root = tmp_path / "root"
    staged(root, "--store", "/data/one", "--prefix", "/srv/indexd")
    command = root / "usr/local/bin/indexd"
    staged(root)  # an update stays where it is
    assert str(command.readlink()) == "/srv/indexd/bin/indexd"
    assert not (root / "opt/indexd").exists()
    before = files(root)
    wrong = install("--root", root, "--uninstall", "--prefix", "/opt/indexd")
    assert (wrong.returncode, wrong.stderr.count("\n"), files(root)) == (2, 1, before)
    assert "it is installed in /srv/indexd" in wrong.stderr
    done = install("--root", root, "--uninstall")
    assert (done.returncode, done.stderr) == (0, "")
    assert "kept" not in done.stdout
    assert not files(root)
    assert not command.is_symlink()


def test_a_move_to_another_prefix_forgets_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    staged(root, "--store", "/data/one")
    said = staged(root, "--prefix", "/srv/indexd")
    assert f"kept     {root}/opt/indexd, where the program was before" in said
    shutil.rmtree(root / "opt/indexd")
    assert "which was edited" not in staged(root, "--store", "/data/two")
    install("--root", root, "--uninstall")
    assert not files(root)


def test_what_nothing_is_known_of_is_not_called_edited(tmp_path: Path) -> None:
    root = tmp_path / "root"
    staged(root, "--store", "/data/one")
    shutil.rmtree(root / "opt/indexd")
    said = install("--root", root, "--uninstall").stdout
    assert said.count("has no copy of how it was installed") == 2
    assert "edited" not in said


@pytest.mark.parametrize(
    "link", ["etc", "etc/indexd", "usr/local", "opt", "opt/indexd", ETC / "indexd.service.d", ETC / "x.target.wants"]
)
def test_a_link_that_leads_out_of_the_tree_is_refused(tmp_path: Path, link: Path | str) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (root / link).parent.mkdir(parents=True)
    (root / link).symlink_to(elsewhere)
    for words in (["--no-program", "--store", "/s"], ["--uninstall", "--purge"]):
        done = install("--root", root, *words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
        assert f"leads out of --root, to {elsewhere}" in done.stderr
    assert not [*elsewhere.iterdir(), *files(root)]
    (root / link).unlink()
    (root / "inside").mkdir()
    (root / link).symlink_to(Path(*[".."] * (len(Path(link).parts) - 1), "inside"))
    staged(root, "--store", "/s")


# A Python whose environments say that they are of another one, at $PYTHON_HOME.
_PYTHON = """#!/bin/sh
test "$2" = venv || exit 0
mkdir -p "$3/bin" "$3/lib"
printf 'home = %s\\ncommand = %s\\n' "$PYTHON_HOME" "$3" > "$3/pyvenv.cfg"
cp "$0" "$3/bin/python"
"""


@pytest.mark.parametrize(("home", "is_hidden"), [("/root/.pyenv/bin", 1), ("/home/op/bin", 1), ("/usr/bin", 0)])
def test_a_python_that_no_service_may_start_is_said_of_a_staged_one(tmp_path: Path, home: str, is_hidden: int) -> None:
    root, python = tmp_path / "root", tmp_path / "python"
    root.mkdir()
    python.write_text(_PYTHON, "utf-8")
    python.chmod(0o755)
    for _ in range(2):  # also when the program is up to date
        done = install("--root", root, PYTHON=str(python), PYTHON_HOME=home)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.count("careful  indexd cannot run /opt/indexd/bin/indexd: set PYTHON") == is_hidden
