"""``scripts/soak``: daemon and writer under random faults, verified deeply after each round; see ``--help``.

Faults are dealt from a shuffled deck, so that each comes up before any comes again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from indexd.cli.output import typed
from indexd.errors import IndexdError
from indexd.index.format import IndexLayout
from indexd.query import TIME_MAX
from soak import writer as log_writer
from soak.world import HASH_SLOT_NUM, INDEX_NUM, SIZES, SoakError, Stop, Tally, World
from support.daemon import assert_same_index, compile_kernels, index_files, indexd, rebuild
from support.naive import (
    BLANK,
    NOT_INDEXED,
    NaiveIndexFile,
    NaiveMessage,
    key_hash,
    naive_frames,
    split_keys,
)
from support.queues import tree

_PROJECT = Path(__file__).resolve().parents[2]
_FAULTS_A_ROUND = 6
# The truth about the log is slow: after so many rounds log and data directory are made anew.
_ROUNDS_A_WORLD = 3
_MOST = 10_000_000
_SECONDS = 180.0

#: (topic, key, index type) -> the physical offsets of its messages.
_Truth = dict[tuple[str, str, str], list[int]]


_LAYOUT = IndexLayout(HASH_SLOT_NUM, INDEX_NUM)
# The newest segments: a cut stays within them, expiry before them.
_CUT_SEGMENTS, _KEPT_SEGMENTS = 3, 8
# Within one tick of the file system's clock two writes cannot be told apart by anybody.
_TICK = 0.1


def _kill(world: World) -> None:
    world.kill()
    world.sleep(0, 0.5)
    world.start()


def _kill_inside_recovery(world: World) -> None:
    world.kill()
    for _ in range(world.rand.randint(1, 2)):
        world.start()
        world.daemon.wait_event("starting")
        world.sleep(0, 0.4)
        world.kill()
    world.start()


def _pause(world: World) -> None:
    with _paused(world):
        world.sleep(0.2, 2.5)


def _terminate(world: World) -> None:
    world.terminate()
    world.sleep(0, 0.5)
    world.start()


def _cut(world: World) -> None:
    world.wait_segments(_CUT_SEGMENTS + 1)
    with _in_some_state(world):
        end = world.stop_writing(kill=world.rand.random() < 0.5)
        segments = log_writer.segments(world.store)
        behind = [path for path in segments if int(path.name) < end][-world.rand.randint(1, _CUT_SEGMENTS) :]
        known = [message.phy_offset for message in naive_frames(behind, log_writer.SEGMENT_SIZE)]
        # Never to before the first message of all: nothing would tell the log from another store's then.
        known = known[1:] if int(behind[0].name) == int(segments[0].name) else known
        at = int(behind[-1].name) if world.rand.random() < 0.2 and len(behind) > 1 else world.rand.choice(known)
        log_writer.cut(world.store, at)
        world.was_disturbed = True
        world.note(f"the log was cut at {at}")
        world.sleep(0, 0.3)
        world.write_from(at)
        world.sleep(0, 0.5)


def _tear(world: World) -> None:
    world.wait_segments(1)
    with _in_some_state(world):
        end = world.stop_writing(kill=True)
        size = log_writer.tear(world.store, end, world.rand)
        world.note(f"{size} bytes of a frame stand behind {end}")
        world.sleep(0, 1.0)
        world.write_from(end)


def _expire(world: World) -> None:
    count = world.rand.randint(1, 10)
    world.wait_segments(_KEPT_SEGMENTS + count)
    with _in_some_state(world):
        world.has_expired = True
        log_writer.expire(world.store, count)
        world.note(f"{count} segments expired, {log_writer.segments(world.store)[0].name} is the first now")
        world.sleep(0, 0.5)


def _remove(world: World) -> None:
    path = world.rand.choice(_wait_index_files(world, 1))
    world.was_disturbed = True
    path.unlink(missing_ok=True)
    world.note(f"index file {path.name} was removed")


def _remove_beside(world: World) -> None:
    folder = world.data / world.rand.choice(["consumequeue", "sparse"])
    world.look_after_daemon()
    world.daemon.wait_event("running")
    path = world.rand.choice(world.daemon.wait_for(lambda: _files(folder) or None, f"files in {folder}"))
    world.was_disturbed = True
    path.unlink(missing_ok=True)
    world.note(f"{path.relative_to(world.data)} was removed")


def _files(folder: Path) -> list[Path]:
    # Folders come and go meanwhile.
    return sorted(Path(at, name) for at, _, names in os.walk(folder) for name in names)


def _overwrite(world: World) -> None:
    # Of the file that is being built the daemon moves the time of change itself: only full ones.
    path = world.rand.choice(_wait_index_files(world, 2)[:-1])
    time.sleep(_TICK)
    position = world.rand.choice([0, _LAYOUT.slot_position(world.rand.randrange(HASH_SLOT_NUM)),
                                  _LAYOUT.entry_position(world.rand.randrange(INDEX_NUM))])  # fmt: skip
    size = world.rand.choice([1, 40, 4000])
    world.was_disturbed = True
    try:
        with path.open("r+b") as file:
            file.seek(position)
            file.write(world.rand.randbytes(size))
    except FileNotFoundError:  # a recovery was faster
        world.note(f"index file {path.name} is gone")
        return
    world.note(f"{size} bytes of index file {path.name} were overwritten from {position} on")


FAULTS: dict[str, Callable[[World], None]] = {
    "kill": _kill,
    "killInsideRecovery": _kill_inside_recovery,
    "pause": _pause,
    "terminate": _terminate,
    "cut": _cut,
    "tear": _tear,
    "expire": _expire,
    "remove": _remove,
    "removeBeside": _remove_beside,
    "overwrite": _overwrite,
}
#: After these nothing compares the files with a whole build any more.
ENDS_WHOLENESS = {"expire"}


@contextmanager
def _in_some_state(world: World) -> Iterator[None]:
    """What happens to the log happens while the daemon runs, stands still, or is dead; each is counted."""
    state = world.rand.choice(["runs", "runs", "pause", "kill", "terminate"])
    if state == "runs":
        yield
        return
    world.tally.tried[state] += 1
    if state == "pause":
        with _paused(world):
            yield
        return
    world.kill() if state == "kill" else world.terminate()
    yield
    world.start()


@contextmanager
def _paused(world: World) -> Iterator[None]:
    world.look_after_daemon()
    world.signal(signal.SIGSTOP)
    yield
    world.signal(signal.SIGCONT)


def _wait_index_files(world: World, least: int) -> list[Path]:
    world.look_after_daemon()
    world.daemon.wait_event("running")

    def look() -> list[Path] | None:
        found = index_files(world.data)
        return found if len(found) >= least else None

    return world.daemon.wait_for(look, "index files")


def main() -> int:
    """Run rounds; 1 when something did not hold."""
    args = _arguments()
    stop, seed = Stop(), args.seed if args.seed is not None else random.randrange(1 << 32)
    tally = Tally(seed)
    parent = args.work or _PROJECT / "build"
    parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="soak-", dir=parent.resolve()))
    _progress(f"seed {seed}, in {work}")
    world = World(work, random.Random(seed), tally, stop)
    started, ended = time.monotonic(), 0
    try:
        compile_kernels()
        started = time.monotonic()
        _run(world, started + args.seconds, args.rounds, args.queries)
    except (AssertionError, IndexdError, OSError, subprocess.SubprocessError) as error:
        tally.failure = f"round {tally.figures['rounds'] + 1}: {type(error).__name__}: {error}"
        ended = 1
    except SystemExit as stopped:  # what was survived until then counts
        ended = int(stopped.code or 0)
    finally:
        stop.ignore()
        world.end()
        if tally.failure is None and not args.keep:
            shutil.rmtree(work, ignore_errors=True)
        else:
            (work / "history").write_text("\n".join(world.history) + "\n", "utf-8")
    print(tally.to_json(time.monotonic() - started), flush=True)
    if tally.failure is not None:
        _progress(f"seed {seed} failed; all files and what happened are in {work}")
    return ended


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--seconds", type=typed(float, 0.001, 1e9), default=60.0, metavar="N",
                        help="no round begins after so long (default: 60)")  # fmt: skip
    parser.add_argument(
        "--rounds", type=typed(int, 1), metavar="N", help="so many rounds at most; two try every fault once"
    )
    parser.add_argument("--seed", type=int, help="repeat the choices of a run, as far as timing allows")
    parser.add_argument("--queries", type=typed(int, 1), default=5000, metavar="N",
                        help="ask for so many keys after each round (default: 5000); the entries in the files are"
                        " compared all")  # fmt: skip
    parser.add_argument("--work", type=Path, metavar="DIR", help="where to make a directory for it (default: build/)")
    parser.add_argument("--keep", action="store_true", help="leave the files, as after a failure")
    return parser.parse_args()


def _progress(text: str) -> None:
    print(f"soak: {text}", file=sys.stderr, flush=True)


def _run(world: World, deadline: float, rounds: int | None, queries: int) -> None:
    # Until the time or the rounds are over.
    number, deck = 0, list[str]()
    while time.monotonic() < deadline and (rounds is None or number < rounds):
        is_first = number % _ROUNDS_A_WORLD == 0
        if is_first:
            world.renew(number)
        else:
            world.begin_again()
        dealt = list[str]()
        while len(dealt) < _FAULTS_A_ROUND:
            fits = [name for name in deck if not (is_first and name in ENDS_WHOLENESS)]
            if not fits:
                deck += world.rand.sample(list(FAULTS), len(FAULTS))
                continue
            deck.remove(fits[0])
            dealt.append(fits[0])
        number += 1
        world.note(f"round {number}: {', '.join(dealt)}")
        for name in dealt:
            world.sleep(0, 0.5)
            world.look_after_daemon()
            world.tally.tried[name] += 1
            world.note(f"-- {name}")
            FAULTS[name](world)
        check(world, queries)
        world.tally.round_held()
        _progress(f"round {number} held: {', '.join(dealt)}")


def check(world: World, queries: int) -> None:
    """Catch up, verify and compare; the daemon has stopped cleanly then. SoakError or AssertionError otherwise.

    A query costs a good part of a millisecond, so that at most ``queries`` keys are asked for; the entries in the files
    are compared all.
    """
    end = world.finish_writing()
    world.look_after_daemon()
    world.daemon.wait_caught_up(end)
    world.daemon.wait_durable(end)
    world.look_after_daemon()
    messages = log_writer.frames(world.store)
    if messages[-1].phy_offset + messages[-1].size != end:
        raise SoakError(f"the log was written to {end} and can be read to {messages[-1].phy_offset}")
    world.note(f"caught up with {end}, {len(messages)} messages stand in the log")
    _verify(world, "while the daemon runs")
    _query(world, messages, queries)
    world.terminate()
    _verify(world, "after a clean stop")
    _compare_files(world, messages)
    _compare_queues(world, messages)
    _compare_with_rebuild(world)
    left = [str(path) for path in world.data.rglob("*.tmp")] + [
        name for name in ("abort", "state", "starts") if (world.data / name).exists()
    ]
    if left:
        raise SoakError(f"a clean stop left {left}")


def _verify(world: World, when: str) -> None:
    done = indexd("verify", "--deep", "--json", "--store", world.store, "--data", world.data, *SIZES, timeout=_SECONDS)
    if done.returncode:
        raise SoakError(
            f"verify --deep {when} ended with {done.returncode}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        )
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if summary["leftOutEntries"] or not summary["comparedEntries"]:
        raise SoakError(f"verify --deep {when} did not look at everything: {summary}")
    world.tally.add("verifications")


def _texts(message: NaiveMessage) -> list[tuple[str, str]]:
    """Index type and key of each entry that a message has to have, in any order."""
    if message.sys_flag & 0xC in NOT_INDEXED["5.4"]:
        return []
    found = [("K", piece) for piece in split_keys(message.keys)]
    found += [("U", message.uniq_key)] if message.uniq_key is not None else []
    return [*found, ("T", message.tags)] if message.tags else found


def _query(world: World, messages: list[NaiveMessage], most: int) -> None:
    """Keys of all messages, and some that nobody has, by ``query-key``: each message once, and no other."""
    truth: _Truth = defaultdict(list)
    for message in messages:
        for kind, key in set(_texts(message)):
            truth[message.topic, key, kind].append(message.phy_offset)
    if len(truth) > most:
        truth = {asked: truth[asked] for asked in world.rand.sample(list(truth), most)}
    for number in range(50):
        truth["OrderPaid", f"absent-{number}", "K"] = []
    lines = (f"{topic}\t{key}\t{_MOST}\t0\t{TIME_MAX}\t{kind}\n" for topic, key, kind in truth)
    batch = world.work / "batch"
    batch.write_text("".join(lines), "utf-8")
    done = indexd(
        "query-key", "--json", "--batch", batch, "--store", world.store, "--data", world.data, *SIZES,
        env={"INDEXD_QUERY_MAX_NUM": str(_MOST)}, timeout=_SECONDS,
    )  # fmt: skip
    answers = done.stdout.splitlines()
    if done.returncode or len(answers) != len(truth):
        raise SoakError(f"query-key ended with {done.returncode} after {len(answers)} answers: {done.stderr[-4000:]}")
    lost: Counter[Any] = Counter()
    invented: Counter[Any] = Counter()
    for (asked, offsets), line in zip(truth.items(), answers, strict=True):
        found = json.loads(line)["phyOffsets"]
        if sorted(found) != offsets:
            lost.update({(*asked, offset): n for offset, n in (Counter(offsets) - Counter(found)).items()})
            invented.update({(*asked, offset): n for offset, n in (Counter(found) - Counter(offsets)).items()})
    world.tally.add("entriesChecked", sum(map(len, truth.values())))
    _judge(world, lost, invented, "by query")


def _compare_files(world: World, messages: list[NaiveMessage]) -> None:
    """The entries of all files, twins included; those that only point before the log's begin cannot be judged."""
    begin = int(log_writer.segments(world.store)[0].name)
    wanted = Counter(
        (key_hash(f"{message.topic}#{'T#' if kind == 'T' else ''}{key}"), message.phy_offset)
        for message in messages
        for kind, key in _texts(message)
    )
    found: Counter[tuple[int, int]] = Counter()
    for path in index_files(world.data):
        file = NaiveIndexFile.from_bytes(path.read_bytes(), HASH_SLOT_NUM, INDEX_NUM)
        found.update((entry[0], entry[1]) for entry in file.entries[1:] if entry[1] >= begin)
    world.tally.add("filedEntriesChecked", wanted.total())
    _judge(world, wanted - found, found - wanted, "in the files")


def _compare_queues(world: World, messages: list[NaiveMessage]) -> None:
    """Each message that enters a queue has its unit at its queue offset; what has expired cannot be judged."""
    begin = int(log_writer.segments(world.store)[0].name)
    wanted = Counter(
        (message.topic, message.queue_id, message.cq_offset, message.phy_offset, message.size, message.tags_code)
        for message in messages
        if message.sys_flag & 0xC in (0x0, 0x8)
    )
    found: Counter[Any] = Counter()
    for name, data in tree(world.data / "consumequeue").items():
        topic, queue_id, file = name.split("/")
        for at, unit in enumerate(struct.iter_unpack(">qiq", data), int(file) // 20):
            if unit[0] >= begin and unit not in (BLANK, (0, 0, 0)):
                found[topic, int(queue_id), at, *unit] += 1
    world.tally.add("unitsChecked", wanted.total())
    _judge(world, wanted - found, found - wanted, "in the queues")


def _judge(world: World, lost: Counter[Any], invented: Counter[Any], where: str) -> None:
    world.tally.add("entriesLost", lost.total())
    world.tally.add("entriesInvented", invented.total())
    if lost or invented:
        raise SoakError(
            f"{lost.total()} lost and {invented.total()} invented {where}: "
            f"{sorted(lost)[:5]} and {sorted(invented)[:5]}"
        )


def _compare_with_rebuild(world: World) -> None:
    if world.has_expired:
        world.tally.add("rebuildsLeftOut")
        return
    whole = Path(world.work, "whole")
    shutil.rmtree(whole, ignore_errors=True)
    rebuild(world.store, whole, *SIZES)
    assert_same_index(world.data, whole)
    world.tally.add("rebuildsCompared")


if __name__ == "__main__":
    sys.exit(main())
