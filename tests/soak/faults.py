"""The faults: each moves a world for a moment and leaves daemon and writer running, caught up or not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from indexd.index.format import IndexLayout
from soak import writer as log_writer
from soak.world import HASH_SLOT_NUM, INDEX_NUM, World
from support.naive import naive_frames
from support.same_index import index_files

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
