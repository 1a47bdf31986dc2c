"""scripts/install into a staged system, again where somebody was before, and out; systemd-analyze on its units."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from indexd import __version__
from support.missing import need

INSTALL = Path(__file__).resolve().parents[2] / "scripts" / "install"
ETC = Path("etc/systemd/system")
CONFIG, DROP_IN = "etc/indexd/indexd.toml", str(ETC / "indexd.service.d/local.conf")
SYSTEMD = INSTALL.parents[1] / "systemd"


def install(*words: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/install with the variables ``env`` and few others; however it ends."""
    return subprocess.run(
        [INSTALL, *map(str, words)],
        capture_output=True,
        encoding="utf-8",
        env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(Path.home()), **env},
        timeout=600,
        check=False,
    )


def staged(root: Path, *words: object) -> str:
    """Install without a program, as a package does that brings its own; what it says."""
    root.mkdir(exist_ok=True)
    return ended(install("--root", root, "--no-program", *words))


def removed(root: Path, *words: object) -> str:
    """Uninstall; what it says."""
    return ended(install("--root", root, "--uninstall", *words))


def ended(done: subprocess.CompletedProcess[str]) -> str:
    """What it says; nothing may have gone wrong."""
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that says why nothing was done."""
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
    return done.stderr


def files(root: Path) -> dict[str, bytes]:
    """Path below ``root`` -> content, of all files there."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


UNITS = ("indexd.service", "indexd@.service")
# systemd-analyze's own scale: 0 is safe, 10 is not; a service without any hardening has 9.6.
EXPOSURE_MAX = 1.6


def test_the_units_are_sound(root: Path) -> None:
    staged(root, "--store", "/data/rocketmq/store")
    staged(root, "--store", "/data/other store", "--instance", "a")
    for program in ("opt/indexd/bin/indexd", "bin/kill"):
        path = root / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    # What every system has and these units stand on.
    system = Path("/usr/lib/systemd/system")
    (root / "usr/lib/systemd/system").mkdir(parents=True)
    for path in (*system.glob("*.target"), *system.glob("*.slice")):
        shutil.copy(path, root / path.relative_to("/"))
    for unit in ("indexd.service", "indexd@a.service"):
        done = subprocess.run(
            [need("systemd-analyze"), "verify", "--man=no", f"--root={root}", unit],
            capture_output=True, encoding="utf-8", timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS)
def test_the_sandbox_is_tight(unit: str) -> None:
    words = ["security", "--offline=true", "--no-pager", f"--threshold={EXPOSURE_MAX * 10:.0f}", str(SYSTEMD / unit)]
    done = subprocess.run(
        [need("systemd-analyze"), *words], capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_both_units_say_the_same_but_for_the_instance() -> None:
    one, many = ((SYSTEMD / unit).read_text("utf-8").splitlines() for unit in UNITS)
    own = {line for line in many if line not in one and not line.startswith("#")}
    assert {line.partition("=")[0] for line in own} == {"Description", "EnvironmentFile", "ExecStart", "StateDirectory"}
    assert all("%i" in line for line in own)
    assert len(one) == len(many)
    # They come after the addresses that they may listen on.
    assert "Wants=network-online.target" in one
    assert any(line.startswith("After=") and "network-online.target" in line.split("=")[1].split() for line in one)


def test_in_again_and_out(root: Path) -> None:
    assert "systemctl enable --now indexd" in staged(root, "--store", "/data/rocketmq/store")
    first = files(root)
    lines = (root / CONFIG).read_text("utf-8").splitlines()
    assert {'store = "/data/rocketmq/store"', 'data = "/var/lib/indexd"'} <= set(lines)
    drop_in = (root / DROP_IN).read_text("utf-8").splitlines()
    assert {'RequiresMountsFor="/data/rocketmq/store"', 'ReadOnlyPaths="-/data/rocketmq/store"'} <= set(drop_in)
    assert "wrote" not in staged(root), "the second time there is nothing to write"
    assert "wrote" not in staged(root, "--store", "/data/rocketmq/store")
    assert files(root) == first
    removed(root)
    assert (files(root), removed(root)) == ({}, "")


def test_what_was_edited_stays(root: Path) -> None:
    staged(root, "--store", "/data/rocketmq/store")
    mine = {CONFIG: '[store]\nstore = "/mine"\n', DROP_IN: "[Service]\nNice=1\n", "var/lib/indexd/frontier": "durable"}
    unit = root / ETC / "indexd.service"
    unit.write_text("[Service]\nExecStart=/of/an/older/version\n")
    (root / "var/lib/indexd").mkdir(parents=True)
    for name, text in mine.items():
        (root / name).write_text(text)
    assert staged(root, "--store", "/mine").count("which was edited") == 2
    assert unit.read_bytes() == (SYSTEMD / "indexd.service").read_bytes()
    assert removed(root).count("--purge takes") == 3
    kept = files(root)
    assert {name: kept[name].decode() for name in mine} == mine
    assert str(ETC / "indexd.service") not in kept
    removed(root, "--purge")
    assert not files(root)


def test_another_store_and_another_user(root: Path) -> None:
    staged(root, "--store", "/data/one")
    assert "as before" not in staged(root, "--store", "/data/a & b|c", "--user", "rocketmq")
    assert 'store = "/data/a & b|c"' in (root / CONFIG).read_text("utf-8").splitlines()
    assert "User=rocketmq\nGroup=\n" in (root / DROP_IN).read_text("utf-8")
    # The user stays until another is given.
    assert "rocketmq, as before" in staged(root, "--store", "/data/two")
    assert {"User=rocketmq", 'RequiresMountsFor="/data/two"'} <= set((root / DROP_IN).read_text("utf-8").splitlines())
    assert "as before" not in staged(root, "--store", "/data/two", "--user", "indexd")
    assert "User=" not in (root / DROP_IN).read_text("utf-8")
    staged(root, "--prefix", "/usr/lib/indexd")
    assert "ExecStart=/usr/lib/indexd/bin/indexd run" in (root / ETC / "indexd.service").read_text("utf-8")


def test_the_whole_program(root: Path) -> None:
    """With pip, as an operator does it: what is staged runs, and names no path of the staging."""
    root.mkdir()
    ended(install("--root", root))
    program = root / "opt/indexd"
    command = program / "bin/indexd"
    assert command.resolve().read_text("utf-8").startswith("#!/opt/indexd/venv/bin/python")
    version = subprocess.run(
        [program / "venv/bin/python", command, "--version"], capture_output=True, encoding="utf-8", check=True
    )
    assert version.stdout == f"indexd {__version__}\n"
    assert not [path for path in (program / "venv/bin").iterdir() if str(root).encode() in path.read_bytes()]
    assert "is up to date" in ended(install("--root", root))
    (program / ".indexd").write_text("an older one\n")
    # An update that fails leaves the program that is there, and nothing half-made.
    failed = install("--root", root, PIP_INDEX_URL="http://127.0.0.1:9/", PIP_NO_CACHE_DIR="1", PIP_RETRIES="0")
    assert (failed.returncode, "pip failed" in failed.stderr) == (2, True), failed.stderr
    assert command.resolve().exists()
    assert [path.name for path in (root / "opt").iterdir()] == ["indexd"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--stor", "/x"], "unknown option --stor"),
        (["--store"], "--store needs a value"),
        (["--store", "--user"], "--store needs a value"),
        (["--store", "relative"], "relative is no absolute path"),
        (["--store", '/a"b'], "is no absolute path without"),
        (["--store", "/a\nb"], "is no absolute path without"),
        (["--store", "/a/../b"], "is no absolute path without"),
        (["--prefix", "/a b"], "--prefix /a b is no place for a program"),
        (["--purge"], "--purge goes with --uninstall"),
        (["--uninstall", "--store", "/x"], "--uninstall takes all of it away"),
        (["--store", "/x", "--instance", "../x"], "--instance ../x is no name"),
        (["--user", "broker"], "--user goes with --store"),
        (["--store", "/x", "--user", "a b"], "--user a b is no user's name"),
        (["--package", "/no/such.whl"], "--package /no/such.whl does not exist"),
        (["--root", "/no/such/place"], "--root /no/such/place is no directory"),
        (["--prefix", "//"], "--prefix // is no place for a program"),
        (["--store", "/"], "--store / is the whole system"),
        (["--store", "//./"], "--store //./ is the whole system"),
        (["--store", "/x", "--instance", "index"], "--instance index is the name of data of indexd.service"),
        (["--store", "/x", "--instance", "consumequeue"], "--instance consumequeue is the name of data"),
        (["--store", "/x", "--instance", "sparse"], "--instance sparse is the name of data"),
        (["--store", "/x", "--instance", "compiled"], "--instance compiled is the name of data"),
        (["--prefix", "/usr"], "exists and is not from here"),
        (["--prefix", "/usr", "--uninstall"], "exists and is not from here"),
    ],
)
def test_wrong_uses_are_one_line(tmp_path: Path, words: list[str], line: str) -> None:
    (tmp_path / "usr/bin").mkdir(parents=True)
    done = install("--root", tmp_path, *words)
    assert done.returncode == 2
    assert line in done.stderr
    assert done.stderr.startswith("scripts/install: ")
    assert done.stderr.count("\n") == 1 + line.count("\n") or "\n" in "".join(words)
    assert not files(tmp_path)


@pytest.mark.parametrize("edited", [CONFIG, DROP_IN])
def test_one_of_two_files_is_not_changed_to_another_store(root: Path, edited: str) -> None:
    staged(root, "--store", "/s1")
    with (root / edited).open("a") as file:
        file.write("# mine\n")
    before = files(root)
    for store in ("/s2", "/s"):
        assert f"{root / edited} was edited" in refused(install("--root", root, "--no-program", "--store", store))
        assert files(root) == before
    staged(root, "--store", "/s1")
    (root / edited).write_text((root / edited).read_text("utf-8").replace("/s1", "/s2"), "utf-8")
    staged(root, "--store", "/s2")
    assert [path for path, content in files(root).items() if b"/s1" in content and "installed" not in path] == []


def test_it_is_taken_away_from_where_it_was_put(root: Path) -> None:
    staged(root, "--store", "/data/one", "--prefix", "/srv/indexd")
    command = root / "usr/local/bin/indexd"
    staged(root)  # an update stays where it is
    assert (str(command.readlink()), (root / "opt/indexd").exists()) == ("/srv/indexd/bin/indexd", False)
    before = files(root)
    wrong = install("--root", root, "--uninstall", "--prefix", "/opt/indexd")
    assert ("it is installed in /srv/indexd" in refused(wrong), files(root)) == (True, before)
    assert "kept" not in removed(root)
    assert (files(root), command.is_symlink()) == ({}, False)


def test_a_move_to_another_prefix_forgets_nothing(root: Path) -> None:
    staged(root, "--store", "/data/one")
    said = staged(root, "--prefix", "/srv/indexd")
    assert f"kept     {root}/opt/indexd, where the program was before" in said
    shutil.rmtree(root / "opt/indexd")
    assert "which was edited" not in staged(root, "--store", "/data/two")
    shutil.rmtree(root / "srv/indexd")
    # What nothing is known of is not called edited.
    said = removed(root)
    assert (said.count("has no copy of how it was installed"), "edited" in said) == (2, False)


@pytest.mark.parametrize(
    "link", ["etc", "etc/indexd", "usr/local", "opt", "opt/indexd", ETC / "indexd.service.d", ETC / "x.target.wants"]
)
def test_a_link_that_leads_out_of_the_tree_is_refused(tmp_path: Path, root: Path, link: Path | str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (root / link).parent.mkdir(parents=True)
    (root / link).symlink_to(tmp_path / "elsewhere")
    for words in (["--no-program", "--store", "/s"], ["--uninstall", "--purge"]):
        assert f"leads out of --root, to {tmp_path / 'elsewhere'}" in refused(install("--root", root, *words))
    assert not [*(tmp_path / "elsewhere").iterdir(), *files(root)]
    (root / link).unlink()
    (root / "inside").mkdir()
    (root / link).symlink_to(Path(*[".."] * (len(Path(link).parts) - 1), "inside"))
    staged(root, "--store", "/s")


# A Python whose environments say that they are of another one, at $PYTHON_HOME; without one it is too old.
_PYTHON = """#!/bin/sh
test "$2" = venv || exec test -n "$PYTHON_HOME"
mkdir -p "$3/bin" "$3/lib"
printf 'home = %s\\ncommand = %s\\n' "$PYTHON_HOME" "$3" > "$3/pyvenv.cfg"
cp "$0" "$3/bin/python"
"""


@pytest.mark.parametrize(("home", "is_hidden"), [("/root/.pyenv/bin", 1), ("/home/op/bin", 1), ("/usr/bin", 0)])
def test_a_python_that_no_service_may_start_is_said_of_a_staged_one(root: Path, home: str, is_hidden: int) -> None:
    root.mkdir()
    python = root.with_name("python")
    python.write_text(_PYTHON, "utf-8")
    python.chmod(0o755)
    assert "Python 3.11 or newer is needed" in refused(install("--root", root, PYTHON=str(python)))
    for _ in range(2):  # also when the program is up to date
        said = ended(install("--root", root, PYTHON=str(python), PYTHON_HOME=home))
        assert said.count("careful  indexd cannot run /opt/indexd/bin/indexd: set PYTHON") == is_hidden
