"""The keys of [spark], from flags, environment and file, to where a job runs; and what a session is started with."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from indexd.cli.spark import spark_options, uses_spark
from indexd.config import SparkConfig, load
from indexd.errors import SparkError, SparkMissingError, UsageError
from indexd.spark import session as module
from indexd.spark.session import SparkOptions, default_conf, missing_packages, open_session
from support.configs import HOME, no_system_file, refused, write
from support.daemon import indexd_here

__all__ = ["no_system_file"]


def test_flags_environment_and_file(tmp_path: Path) -> None:
    file = write(tmp_path / "i.toml", '[spark]\nconf = ["spark.a=1", "spark.b = x=y "]\nsplit_size = "64MiB"\n')
    made = load({"master": "local[3]"}, file, HOME | {"INDEXD_ENGINE": "spark"})
    assert made.spark == SparkConfig(
        engine="spark", master="local[3]", conf=(("spark.a", "1"), ("spark.b", " x=y ")), split_size=64 << 20
    )
    assert spark_options(made) == SparkOptions("local[3]", None, (("spark.a", "1"), ("spark.b", " x=y ")), None)
    # The last of two of one key holds; in the environment, one a line.
    assert load({"conf": ["spark.a=1", "spark.a=2"]}, file, HOME).spark.conf == (("spark.a", "2"),)
    environ = HOME | {"INDEXD_CONF": "spark.a=1,2\n\nspark.c=3\n"}
    assert load({}, None, environ).spark.conf == (("spark.a", "1,2"), ("spark.c", "3"))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"master": "localhost:7077"}, "is not a master of Spark"),
        ({"master": "sc://host"}, "is not a master of Spark"),
        *(
            ({"master": f"local{slots}"}, "is not a master of Spark")
            for slots in ("[0]", "[x]", "[]", "[-1]", "[2,0]", "[2,x]", "[99999999999]", "-cluster[2]")
        ),
        ({"remote": "spark://host"}, "is not the address of a Spark Connect server"),
        ({"remote": "sc://"}, "is not the address"),
        ({"conf": ["spark.a"]}, 'holds "spark.a": write key=value'),
        ({"conf": ["a=b"]}, 'holds "a=b": write key=value with a key of Spark'),
        ({"engine": "flink"}, "is not one of process, spark"),
        ({"split_size": "-1"}, "is not in 0 to 1TiB"),
        ({"remote": "sc://h", "master": "yarn"}, "on a master or through a Connect server, not on both"),
    ],
)
def test_what_is_refused(flags: dict[str, str], says: str) -> None:
    assert says in str(refused(flags))


def test_flags_that_may_be_repeated_on_the_command_line() -> None:
    done = indexd_here("doctor", "--json", "--conf", "spark.pyspark.python=/x", "--conf", "spark.a=1")
    assert '"workerPython":"/x"' in done.stdout


def test_a_place_without_the_engine_is_a_slip() -> None:
    assert not uses_spark(load({}, None, HOME))
    assert uses_spark(load({"engine": "spark", "master": "yarn"}, None, HOME))
    assert not uses_spark(load({}, None, HOME | {"INDEXD_MASTER": "yarn"})), "it may be there for other commands"
    with pytest.raises(UsageError) as caught:
        uses_spark(load({"remote": "sc://h"}, None, HOME))
    assert caught.value.line() == "--remote is for Spark, and the engine is this process; add --engine spark"


def test_defaults_and_the_users_own_over_them(tmp_path: Path) -> None:
    local = default_conf(SparkOptions("local[2]"), tmp_path, "3g")
    assert local["spark.driver.memory"] == "3g"
    assert local["spark.driver.host"] == local["spark.driver.bindAddress"] == "127.0.0.1"
    assert local["spark.ui.enabled"] == "false"
    assert local["spark.python.unix.domain.socket.enabled"] == "true"
    # Executors of a cluster have to reach the driver.
    assert "spark.driver.host" not in default_conf(SparkOptions("yarn"), tmp_path, "1g")
    own = (("spark.driver.memory", "8g"), ("spark.driver.extraJavaOptions", "-Xss4m"))
    conf = default_conf(SparkOptions("local[2]", conf=own), tmp_path, "3g")
    assert conf["spark.driver.memory"] == "8g"
    assert conf["spark.driver.extraJavaOptions"] == (
        f"-Dlog4j2.configurationFile=file://{tmp_path}/log4j2.properties -Xss4m"
    )


def test_a_master_that_spark_would_fall_over_is_refused_by_a_session_too() -> None:
    for master in ("local[0]", "local[x]", "foo"):
        with pytest.raises(UsageError) as caught, open_session(SparkOptions(master), "test"):
            raise AssertionError("it opened")
        assert caught.value.line().startswith(f"{master} is not a master of Spark; write local[*], ")
    for master in ("local", "local[*]", "local[3]", "local[3, 4]", "local-cluster[2,1,1024]", "yarn", "spark://h:1"):
        assert load({"master": master}, None, HOME).spark.master == master


def test_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_packages(remote=True) == []
    monkeypatch.setattr(module, "_is_installed", lambda name: name != "pyarrow")
    with pytest.raises(SparkMissingError) as caught, open_session(SparkOptions(), "test"):
        raise AssertionError("it opened")
    assert caught.value.exit_code == 2
    assert caught.value.line().startswith("the Spark pipeline needs pyarrow, not installed in ")
    assert caught.value.line().endswith("; pip install 'rocketmq-indexd[spark]'")


@pytest.mark.parametrize("scheme", ["spark", "sc"])
def test_nobody_there_is_said_at_once(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", lambda: None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"{scheme}://127.0.0.1:{free.getsockname()[1]}"
        options = SparkOptions(remote=url) if scheme == "sc" else SparkOptions(url)
        with (
            pytest.raises(SparkError, match=f"nothing answers at {url} .*Connection refused"),
            open_session(options, "x"),
        ):
            raise AssertionError("it opened")
