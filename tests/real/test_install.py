"""scripts/install into a staged system, again where somebody was before, and out; systemd-analyze on its units."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from indexd import __version__
from support.missing import need

INSTALL = Path(__file__).resolve().parents[2] / "scripts" / "install"
ETC = Path("etc/systemd/system")
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
    """Install without a program, as a package does that brings its own."""
    root.mkdir(exist_ok=True)
    done = install("--root", root, "--no-program", *words)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def files(root: Path) -> dict[str, bytes]:
    """Path below ``root`` -> content, of all files there."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


UNITS = ("indexd.service", "indexd@.service")
# systemd-analyze's own scale: 0 is safe, 10 is not; a service without any hardening has 9.6.
EXPOSURE_MAX = 1.6


def test_the_units_are_sound(tmp_path: Path) -> None:
    root = tmp_path / "root"
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
    level = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert level, done.stderr
    assert float(level[1]) <= EXPOSURE_MAX
    assert done.returncode == 0, done.stdout


def test_both_units_say_the_same_but_for_the_instance() -> None:
    one, many = ((SYSTEMD / unit).read_text("utf-8").splitlines() for unit in UNITS)
    own = {line for line in many if line not in one and not line.startswith("#")}
    assert {line.partition("=")[0] for line in own} == {"Description", "EnvironmentFile", "ExecStart", "StateDirectory"}
    assert all("%i" in line for line in own)
    assert len(one) == len(many)


@pytest.mark.parametrize("unit", UNITS)
def test_it_comes_after_the_addresses_that_it_may_listen_on(unit: str) -> None:
    lines = (SYSTEMD / unit).read_text("utf-8").splitlines()
    assert "Wants=network-online.target" in lines
    assert any(line.startswith("After=") and "network-online.target" in line.split("=")[1].split() for line in lines)


def test_in_again_and_out(tmp_path: Path) -> None:
    root = tmp_path / "root"
    said = staged(root, "--store", "/data/rocketmq/store")
    assert "systemctl enable --now indexd" in said
    first = files(root)
    config = root / "etc/indexd/indexd.toml"
    lines = config.read_text("utf-8").splitlines()
    assert 'store = "/data/rocketmq/store"' in lines
    assert 'data = "/var/lib/indexd"' in lines
    drop_in = (root / ETC / "indexd.service.d/local.conf").read_text("utf-8")
    assert 'RequiresMountsFor="/data/rocketmq/store"' in drop_in
    assert 'ReadOnlyPaths="-/data/rocketmq/store"' in drop_in
    assert "wrote" not in staged(root), "the second time there is nothing to write"
    assert "wrote" not in staged(root, "--store", "/data/rocketmq/store")
    assert files(root) == first
    done = install("--root", root, "--uninstall")
    assert done.returncode == 0
    assert not files(root)
    assert install("--root", root, "--uninstall").stdout == ""


def test_what_was_edited_stays(tmp_path: Path) -> None:
    root = tmp_path / "root"
    staged(root, "--store", "/data/rocketmq/store")
    config, drop_in = root / "etc/indexd/indexd.toml", root / ETC / "indexd.service.d/local.conf"
    config.write_text('[store]\nstore = "/mine"\n')
    drop_in.write_text("[Service]\nNice=1\n")
    unit = root / ETC / "indexd.service"
    unit.write_text("[Service]\nExecStart=/of/an/older/version\n")
    data = root / "var/lib/indexd"
    data.mkdir(parents=True)
    (data / "frontier").write_bytes(b"durable")
    said = staged(root, "--store", "/mine")
    assert said.count("which was edited") == 2
    assert unit.read_bytes() == (SYSTEMD / "indexd.service").read_bytes()
    assert install("--root", root, "--uninstall").stdout.count("--purge takes") == 3
    kept = set(files(root))
    assert kept >= {str(path.relative_to(root)) for path in (config, drop_in, data / "frontier")}
    assert not any("/systemd/system/indexd" in path for path in kept if path.endswith("service"))
    assert config.read_text() == '[store]\nstore = "/mine"\n'
    assert install("--root", root, "--uninstall", "--purge").returncode == 0
    assert not files(root)


def test_another_store_and_another_user(tmp_path: Path) -> None:
    root = tmp_path / "root"
    staged(root, "--store", "/data/one")
    staged(root, "--store", "/data/a & b|c", "--user", "rocketmq")
    assert 'store = "/data/a & b|c"' in (root / "etc/indexd/indexd.toml").read_text("utf-8").splitlines()
    assert "User=rocketmq\nGroup=\n" in (root / ETC / "indexd.service.d/local.conf").read_text("utf-8")
    staged(root, "--prefix", "/usr/lib/indexd")
    assert "ExecStart=/usr/lib/indexd/bin/indexd run" in (root / ETC / "indexd.service").read_text("utf-8")


def test_the_whole_program(tmp_path: Path) -> None:
    """With pip, as an operator does it: what is staged runs, and names no path of the staging."""
    root = tmp_path / "root"
    root.mkdir()
    done = install("--root", root)
    assert done.returncode == 0, done.stderr
    program = root / "opt/indexd"
    command = program / "bin/indexd"
    assert command.resolve().read_text("utf-8").startswith("#!/opt/indexd/venv/bin/python")
    version = subprocess.run(
        [program / "venv/bin/python", command, "--version"], capture_output=True, encoding="utf-8", check=True
    )
    assert version.stdout == f"indexd {__version__}\n"
    assert not [path for path in (program / "venv/bin").iterdir() if str(root).encode() in path.read_bytes()]
    assert not (root / "opt/indexd.new").exists()
    assert "is up to date" in install("--root", root).stdout
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
    shutil.rmtree(root / "srv/indexd")
    # What nothing is known of is not called edited.
    said = install("--root", root, "--uninstall").stdout
    assert (said.count("has no copy of how it was installed"), "edited" in said) == (2, False)


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


# A Python whose environments say that they are of another one, at $PYTHON_HOME; without one it is too old.
_PYTHON = """#!/bin/sh
test "$2" = venv || exec test -n "$PYTHON_HOME"
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
    done = install("--root", root, PYTHON=str(python))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "Python 3.11 or newer is needed" in done.stderr
    for _ in range(2):  # also when the program is up to date
        done = install("--root", root, PYTHON=str(python), PYTHON_HOME=home)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.count("careful  indexd cannot run /opt/indexd/bin/indexd: set PYTHON") == is_hidden
