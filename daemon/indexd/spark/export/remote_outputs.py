"""The files of an export's target behind a URI, by pyarrow's file systems: nothing is renamed, and nothing locked."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from indexd.config.units import RemotePath
from indexd.spark.export.outputs import TEMPORARY, Output, is_led_out
from indexd.storage.remote import RemoteDisk, files_below, locate, named


class RemoteFiles:
    """A bucket or a folder of one. A file appears when it is whole, except on ``file://`` and ``hdfs://``."""

    # Each holds the part that is on its way, some MiB.
    open_max = 8

    def __init__(self, root: RemotePath) -> None:
        self._root = root
        self._disk = RemoteDisk()

    def written_name(self, job: str, name: str) -> str:  # noqa: ARG002 - there is no other
        return name

    def create(self, job: str, name: str) -> Output:  # noqa: ARG002 - the name holds it
        return _RemoteOutput(name, self._root / name)

    def below(self, directory: str) -> Iterator[str]:
        prefix = directory and f"{directory}/"
        yield from (prefix + name for name in files_below(self._root / directory))

    def leads_out(self, name: str) -> bool:
        system, place = locate(self._root)
        return system.type_name == "local" and is_led_out(Path(place), name)

    def size(self, name: str) -> int | None:
        return self._disk.stamp(self._root / name).size if self._disk.exists(self._root / name) else None

    def read(self, name: str) -> bytes | None:
        return self._disk.read(self._root / name) if self._disk.exists(self._root / name) else None

    def write(self, name: str, data: bytes) -> None:
        output = _RemoteOutput(name, self._root / name)
        with named("write", self._root / name):
            output.sink.write(data)
        output.finish()

    def move(self, moves: Mapping[str, str]) -> None:
        """Nothing: they were written where they stay."""

    def remove(self, names: Collection[str]) -> None:
        for name in names:
            system, place = locate(self._root / name)
            with named("remove", self._root / name):
                if system.get_file_info([place])[0].is_file:
                    system.delete_file(place)

    def drop(self, job: str, kept: Collection[str]) -> None:
        mine = (name for name in self.below("") if f"-{job}-" in name or name.startswith(f"{TEMPORARY}/{job}/"))
        self.remove([name for name in mine if name not in kept])
        if not any(self.below(TEMPORARY)) and self._disk.exists(self._root / TEMPORARY):
            system, place = locate(self._root / TEMPORARY)
            with named("remove", self._root / TEMPORARY):
                system.delete_dir(place)

    @contextmanager
    def locked(self) -> Iterator[None]:
        # An object store has no locks: that one export at a time writes a target is for its operator to see to.
        yield


class _RemoteOutput:
    def __init__(self, name: str, path: RemotePath) -> None:
        self.name = name
        self._path = path
        system, place = locate(path)
        with named("create", path):
            if system.type_name in ("local", "hdfs"):
                system.create_dir(place.rpartition("/")[0], recursive=True)
            self.sink = system.open_output_stream(place)

    def finish(self) -> int:
        with named("write", self._path):
            size = int(self.sink.tell())
            self.sink.close()
        return size

    def discard(self) -> None:
        # Closing is the only way to let go of it: what is half a file is removed with the job.
        with suppress(OSError):
            self.sink.close()
