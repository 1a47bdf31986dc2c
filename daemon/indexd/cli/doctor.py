"""doctor: what the pipeline on Spark would be started with here, and what is missing; starts nothing."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from indexd import __version__
from indexd.cli.output import Parser, add_command, print_json, print_line, until_reader_leaves, wants_json
from indexd.config import Config
from indexd.config.compiled import prepare_compiler
from indexd.config.units import printable

# What pyproject.toml asks for under [spark]; a part of the versions is enough to tell what does not work.
_Wanted = Mapping[str, tuple[tuple[int, ...], tuple[int, ...] | None]]  # name -> at least, and below
_NEEDED: _Wanted = {
    "pyspark": ((4, 2), (5,)),
    "pandas": ((2, 2), (3,)),
    "pyarrow": ((18,), None),
    "numpy": ((2,), None),
    "numba": ((0, 61), None),
}
_FOR_CONNECT: _Wanted = {
    "grpcio": ((1,), None),
    "grpcio-status": ((1,), None),
    "googleapis-common-protos": ((1,), None),
}
_FOR_PAGES: _Wanted = {"jinja2": ((3,), None), "rich": ((14,), None)}
_INSTALL = "pip install 'rocketmq-indexd[spark]'"
_NO_PROGRAM = "which is no program that can be started"
_EXIT_FINDINGS = 1


def register(commands: Any, common: Parser) -> None:
    """Add the command."""
    text = "say what Spark would run with: which Java, Python and packages, and what is missing"
    add_command(commands, "doctor", [common], text).set_defaults(function=doctor)


def doctor(args: argparse.Namespace, config: Config) -> int:
    """Look and say; 1 if a job could not be started from here."""
    report = examine(config)
    with until_reader_leaves():
        if wants_json(args):
            print_json(report)
        else:
            _print_report(report)
    return 0 if report["usable"] else _EXIT_FINDINGS


def examine(config: Config) -> dict[str, Any]:
    """Everything that is said, under its names in --json; ``problems`` are those that keep a job from starting."""
    remote = config.spark.remote
    problems: list[str] = []
    notes: list[str] = []
    packages = _packages({**_NEEDED, **(_FOR_CONNECT if remote else {})}, problems)
    packages |= _packages(_FOR_PAGES, notes)
    java = None if remote else _java(config, problems)
    _check_pythons(config, problems, notes)
    cache, is_writable = _compiled()
    if not is_writable:
        notes.append("the kernels are compiled anew in each process, which takes seconds: make its cache writable")
    return {
        "indexd": __version__,
        "runsOn": remote or config.spark.master,
        "java": java,
        "python": {"version": ".".join(map(str, sys.version_info[:3])), "executable": sys.executable},
        "workerPython": _worker_python(config),
        "packages": packages,
        "compiled": {"directory": str(cache), "writable": is_writable},
        "problems": problems,
        "notes": notes,
        "usable": not problems,
    }


def _packages(wanted: _Wanted, problems: list[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name, (least, below) in wanted.items():
        found[name] = text = _version(name)
        if text is None:
            problems.append(f"{name} is not installed: {_INSTALL}")
            continue
        numbers = tuple(map(int, re.findall(r"\d+", text)[:3]))
        if numbers < least or (below is not None and numbers >= below):
            limit = f" and below {_dotted(below)}" if below else ""
            problems.append(f"{name} {text} does not fit, it has to be {_dotted(least)} or newer{limit}: {_INSTALL}")
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        # The client of Connect alone is a package of its own.
        return _version("pyspark-client") if name == "pyspark" else None


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _java(config: Config, problems: list[str]) -> dict[str, Any]:
    from indexd.spark.session import INSTALL_HINT, JAVA_MIN, choose_java  # noqa: PLC0415 - no other command loads it

    choice = choose_java(config.spark.java_home, os.environ)
    if choice.java is None:
        problems.append(f"there is no Java {JAVA_MIN} or newer: {INSTALL_HINT}")
    taken = choice.java
    return {
        "home": str(taken.home) if taken else None,
        "version": taken.version if taken else None,
        "from": taken.source if taken else None,
        "passedOver": list(choice.passed_over),
    }


def _worker_python(config: Config) -> str:
    given = dict(config.spark.conf).get("spark.pyspark.python")
    if config.spark.remote is not None:
        return "the server's"
    is_local = config.spark.master.startswith("local")
    return given or (sys.executable if is_local else os.environ.get("PYSPARK_PYTHON", "python3 of each executor"))


def _check_pythons(config: Config, problems: list[str], notes: list[str]) -> None:
    """On this machine, that what is named for a Python is one that can be started."""
    if config.spark.remote is not None or not config.spark.master.startswith("local"):
        return
    conf = dict(config.spark.conf)
    keys = ("spark.pyspark.python", "spark.pyspark.driver.python")
    problems += [f"{key} is {conf[key]}, {_NO_PROGRAM}" for key in keys if key in conf and not shutil.which(conf[key])]
    # A session sets these itself here, to that Python or to this one.
    names = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
    given = {name: os.environ[name] for name in names if os.environ.get(name)}
    notes += [
        f"{name} is {given[name]}, {_NO_PROGRAM}; not used here" for name in given if not shutil.which(given[name])
    ]


def _compiled() -> tuple[Path, bool]:
    """The kernels' cache, made if need be, and whether it outlives this process."""
    prepare_compiler()
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    is_lasting = not folder.name.startswith("indexd-compiled-")  # else it is this process's own, for want of another
    if folder.is_dir():
        return folder, is_lasting and os.access(folder, os.W_OK | os.X_OK)
    parent = next(path for path in folder.absolute().parents if path.exists())
    return folder, is_lasting and os.access(parent, os.W_OK | os.X_OK)


def _print_report(report: dict[str, Any]) -> None:
    java, python = report["java"], report["python"]
    print_line(f"indexd    {report['indexd']}")
    print_line(f"runs on   {printable(report['runsOn'])}")
    if java is None:
        print_line("Java      none needed for Connect")
    else:
        taken = f"{java['version']} at {java['home']} (from {java['from']})" if java["home"] else "none"
        print_line(f"Java      {printable(taken)}")
        for line in java["passedOver"]:
            print_line(f"          passed over {printable(line)}")
    print_line(f"Python    {python['version']} at {printable(python['executable'])}")
    print_line(f"workers   {printable(report['workerPython'])}")
    for start, (name, text) in enumerate(report["packages"].items()):
        print_line(f"{'' if start else 'packages':10}{name} {text or 'not installed'}")
    compiled = report["compiled"]
    print_line(f"kernels   {printable(compiled['directory'])} ({'' if compiled['writable'] else 'not '}writable)")
    for line in report["notes"]:
        print_line(f"note: {printable(line)}")
    for line in report["problems"]:
        print_line(f"missing: {printable(line)}")
    print_line("Spark can be used" if report["usable"] else "Spark cannot be used")
