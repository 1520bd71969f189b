"""How does a flat mapping of name -> array become files that can be trusted?

A checkpoint is one folder: `arrays-<id>/`, written by Orbax, and `manifest.json`, written by us, last, and moved into
place in one step. The manifest names every leaf and every file with its digest and carries a digest of itself. Whoever
sees a manifest sees a finished checkpoint; a save that was killed leaves at most a folder that nothing points to.
"""

# Why our own digests? Orbax restores what it finds: of six flipped bits five came back as silently wrong numbers, and a
# removed commit marker is not missed. CRC-32 runs at 4.2 GB/s here, SHA-256 at 1.8 (with the CPU's SHA instructions),
# BLAKE2b at 0.9. The enemy is a bad disk, not an attacker, and CRC-32 finds every burst of up to 32 bits. Leaves have
# a digest of their values (memory to memory), files one of their bytes (which file is bad, before anything parses it).
#
# Why the handler and not `ocp.Checkpointer`? The Checkpointer adds a temporary folder and a rename, which the manifest
# makes superfluous, and with several processes its barriers are device collectives, which we never use as barriers.
#
# Why packs? One array is one folder, two files and about a millisecond of Python that the training thread cannot use.
# 450 leaves of 64 KB take 790 ms as 450 arrays and 83 ms in packs; from 1 MB on packing gains nothing.
#
# Why neither OCDBT nor compression? 25 arrays of 4 MB: OCDBT 240 ms, plain with zstd 185 ms, plain 115 ms; float
# weights shrink by 4 %. Plain files also tell which leaf a damaged file belongs to.

import dataclasses
import difflib
import hashlib
import json
import logging
import os
import secrets
import shutil
import threading
import urllib.parse
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from replicax._errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError, message

MANIFEST = "manifest.json"
FORMAT = "replicax checkpoint 1"
PACKED_BELOW = 1 << 20
PACK_BYTES = 16 << 20
SAVE_DEADLINE = 1800.0

StrPath = str | os.PathLike[str]

_log = logging.getLogger("replicax")


class Target(Protocol):
    """What a leaf should become: an array, a `jax.ShapeDtypeStruct`, anything with a shape and a dtype.

    If it has a `sharding` that is not None, the loaded leaf is laid out so; otherwise it stays a NumPy array.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One saved array. `place` is None for an array without elements; `key` is the kind of a PRNG key."""

    shape: tuple[int, ...]
    dtype: str
    digest: str
    place: str | None
    offset: int | None = None
    key: str | None = None

    def __str__(self) -> str:
        return _describe(self.shape, np.dtype(self.dtype)) if self.key is None else _describe(*_as_key(self))


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """One file of a checkpoint, as it was right after the save."""

    bytes: int
    digest: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a finished checkpoint holds: every leaf, every file, and what the caller wanted to remember beside them."""

    folder: str
    leaves: dict[str, Leaf]
    files: dict[str, StoredFile]
    metadata: dict[str, Any]

    def files_of(self, names: Iterable[str]) -> list[str]:
        """The files that must be whole for these leaves to be readable."""
        needed = {self.leaves[name].place for name in names}
        others = {leaf.place for leaf in self.leaves.values()} - needed
        return [file for file in self.files if _array_of(file) not in others]

    def leaves_in(self, file: str) -> list[str]:
        """The leaves whose bytes are in this file; none for Orbax's own metadata."""
        return [name for name, leaf in self.leaves.items() if leaf.place is not None and leaf.place == _array_of(file)]


def _array_of(file: str) -> str:
    """`arrays-1f/0003-w/0` is a piece of the array `0003-w`; `arrays-1f/_METADATA` belongs to no single one."""
    return file.split("/")[1]


# ---------------------------------------------------------------------------------------------------------------------
# Saving
# ---------------------------------------------------------------------------------------------------------------------


def save(
    path: StrPath,
    arrays: Mapping[str, ArrayLike],
    metadata: Mapping[str, Any] | None = None,
    then: Callable[[], None] | None = None,
) -> None:
    """Writes the arrays and returns when they are safely on disk; an older checkpoint there is replaced in one step.

    Args:
      metadata: Anything JSON can hold; `read_manifest` gives it back.
      then: Called once the checkpoint is on disk, in the thread that wrote it.
    """
    begin(path, arrays, metadata, then).run()


def save_async(
    path: StrPath,
    arrays: Mapping[str, ArrayLike],
    metadata: Mapping[str, Any] | None = None,
    then: Callable[[], None] | None = None,
) -> "PendingSave":
    """Like `save`, in a thread. When it returns the save has copies, and the arrays may be donated or overwritten."""
    pending = begin(path, arrays, metadata, then)
    pending.start()
    return pending


class PendingSave:
    """A save under way.

    Training goes on while it runs. `wait` returns when the checkpoint is on disk, and raises what went wrong
    if it is not. A program that ends waits for its saves by itself.
    """

    def __init__(
        self, path: Path, arrays: dict[str, "_Snapshot"], metadata: str, then: Callable[[], None] | None
    ) -> None:
        self.path = path
        self.state = "waiting to start"
        self._arrays, self._metadata, self._then = arrays, metadata, then
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"replicax-save-{path.name}")
        self._result: Future[None] = Future()

    def __repr__(self) -> str:
        return f"<PendingSave {str(self.path)!r}: {self.state}>"

    def start(self) -> None:
        """Writes in a thread."""
        self._result = self._thread.submit(self._save_unwatched)
        self._thread.shutdown(wait=False)  # the thread ends with its one task

    def run(self) -> None:
        """Writes here and now. One process writes; the others hold the same values."""
        try:
            self._save()
        finally:
            self._result.set_result(None)

    def _save(self) -> None:
        arrays, self._arrays = self._arrays, {}
        try:
            if jax.process_index() != 0:
                return
            _write(self.path, arrays, self._metadata, self._say)
            if self._then is not None:
                self._then()
            self.state = "finished"
        except (OSError, ValueError, RuntimeError) as error:  # what the file system, Orbax and TensorStore raise
            at, self.state = self.state, "failed"
            raise _not_written(self.path, at, error) from error
        finally:
            _under_way.pop(self.path, None)

    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._result.done()

    def wait(self, timeout: float | None = SAVE_DEADLINE) -> None:
        """Returns when the checkpoint is on disk.

        Raises:
          CheckpointError: If it could not be written; the older checkpoint at that path is then still whole.
          TimeoutError: If it takes longer than `timeout` seconds. The save goes on.
        """
        try:
            self._result.result(timeout)
        except TimeoutError:
            raise _too_slow(self, timeout) from None
        finally:
            if self._result.done():
                self._thread.shutdown(wait=True)

    def _save_unwatched(self) -> None:
        try:
            self._save()
        except CheckpointError as error:
            _log.error("%s", error)  # `wait` raises it, but nobody has to call `wait`
            raise

    def _say(self, state: str) -> None:
        self.state = state


_under_way: dict[Path, PendingSave] = {}


def settle(folder: Path) -> None:
    """Waits for saves under way at `folder` or in it. Whether they succeed is asked of the files, or of `wait`."""
    here = [pending._result for path, pending in list(_under_way.items()) if path.is_relative_to(folder)]
    wait_for_all(here, SAVE_DEADLINE)


def _finish_saves_at_exit() -> None:
    wait_for_all([pending._result for pending in list(_under_way.values())], SAVE_DEADLINE)


# Orbax hands pieces of a save to `concurrent.futures`, which takes no more work once the main thread has ended, and
# `atexit` runs too late for that: a save under way at the end of a program was lost. The hook below runs first.
threading._register_atexit(_finish_saves_at_exit)  # type: ignore[attr-defined]


def begin(
    path: StrPath,
    arrays: Mapping[str, ArrayLike],
    metadata: Mapping[str, Any] | None = None,
    then: Callable[[], None] | None = None,
) -> PendingSave:
    """The first part of a save, for a caller who holds a lock while it lasts: takes the copies and writes nothing."""
    final = Path(path).absolute()
    if final in _under_way:
        raise _already_saving(_under_way[final])
    import_orbax()  # not in the thread, where a program that ends would not let it
    pending = PendingSave(final, snapshot(arrays), _as_json(final, dict(metadata or {})), then)
    _under_way[final] = pending
    return pending


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    """A copy that is ours alone, perhaps still on its way to the host. `key` is the kind of a PRNG key."""

    value: np.ndarray | jax.Array
    key: str | None


def snapshot(arrays: Mapping[str, ArrayLike]) -> dict[str, _Snapshot]:
    """Copies arrays so that the caller may go on: the engine gives its buffers away with the next step.

    Copies of device arrays are only started. With a step of 1.5 s in flight the caller is held for 1 ms (25 arrays of
    4 MB); waiting for them on the host would hold him until the step is done. They go to pinned host memory, so no
    device needs room for them. A replicated array is copied once, from its first device.
    """
    plain = {name: _without_key(name, array) for name, array in arrays.items()}
    on_device = {name: _one_copy(name, value) for name, (value, _) in plain.items() if isinstance(value, jax.Array)}
    started = jax.device_put(on_device, {n: _on_host(x.sharding) for n, x in on_device.items()}, may_alias=False)
    return {
        name: _Snapshot(started[name] if name in started else _host_copy(name, value), key)
        for name, (value, key) in plain.items()
    }


def _without_key(name: str, array: ArrayLike) -> tuple[ArrayLike, str | None]:
    if isinstance(array, jax.Array) and array.is_deleted():
        raise _deleted(name, array)
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(array), str(jax.random.key_impl(array))
    return array, None


def _one_copy(name: str, array: jax.Array) -> jax.Array:
    if array.is_fully_replicated:
        return array.addressable_data(0)
    if not array.is_fully_addressable:
        raise _lies_elsewhere(name, array)
    return array


def _on_host(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    device = next(iter(sharding.addressable_devices))
    kinds = {memory.kind for memory in device.addressable_memories()}
    return sharding.with_memory_kind("pinned_host") if "pinned_host" in kinds else sharding


def _host_copy(name: str, value: ArrayLike) -> np.ndarray:
    copy = np.array(value)
    if copy.dtype.hasobject or copy.dtype.names or copy.dtype.kind in "SUmM":
        raise _not_an_array(name, value)
    return copy.astype(copy.dtype.newbyteorder("="), copy=False)


def _write(path: Path, arrays: dict[str, _Snapshot], metadata: str, say: Callable[[str], None]) -> None:
    folder = f"arrays-{secrets.token_hex(4)}"
    say(f"copying {len(arrays)} leaves to the host")
    hosts = {name: np.asarray(item.value) for name, item in arrays.items()}
    keys = {name: item.key for name, item in arrays.items()}
    arrays.clear()
    leaves, blobs = _lay_out(hosts, keys)
    say(f"writing {sum(blob.nbytes for blob in blobs.values()) / 1e6:.1f} MB")
    (path / folder).mkdir(parents=True)
    if blobs:
        orbax = import_orbax()
        _handler().save(_as_orbax(path / folder), args=orbax.args.PyTreeSave(blobs))
    say("reading back what was written")
    files = _digest_files(path, folder)
    say("putting the manifest in place")
    _commit(path, _encode(folder, leaves, files, metadata))
    _remove_other_folders(path, keep=folder)


def _lay_out(
    hosts: dict[str, np.ndarray], keys: dict[str, str | None]
) -> tuple[dict[str, Leaf], dict[str, np.ndarray]]:
    """Decides where each leaf goes: alone under its own name, or with other small ones into a pack of bytes."""
    leaves: dict[str, Leaf] = {}
    alone: dict[str, np.ndarray] = {}
    packs: list[list[np.ndarray]] = [[]]
    offset = 0
    for name, value in hosts.items():
        leaf = Leaf(value.shape, value.dtype.name, _digest(value), place=None, key=keys[name])
        if value.nbytes >= PACKED_BELOW:
            place = f"{len(alone):04d}-{urllib.parse.quote(name, safe='')[:80]}"
            alone[place] = _as_storable(value)
            leaf = dataclasses.replace(leaf, place=place)
        elif value.size:
            if offset + value.nbytes > PACK_BYTES:
                packs.append([])
                offset = 0
            packs[-1].append(_bytes(value))
            leaf = dataclasses.replace(leaf, place=f"pack-{len(packs) - 1:04d}", offset=offset)
            offset += value.nbytes
        leaves[name] = leaf
    packed = {f"pack-{i:04d}": np.concatenate(parts) for i, parts in enumerate(packs) if parts}
    return leaves, alone | packed


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _as_storable(array: np.ndarray) -> np.ndarray:
    """TensorStore knows most but not all of the small float and integer types; as plain integers it knows all."""
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")


def import_orbax() -> Any:
    """Imported on first use: it takes longer than all of replicax."""
    import orbax.checkpoint

    return orbax.checkpoint


def _handler() -> Any:
    return import_orbax().PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)


def _as_orbax(path: Path) -> Any:
    from etils import epath  # the paths that Orbax's handlers take

    return epath.Path(path)


def _digest(array: np.ndarray) -> str:
    return f"{zlib.crc32(_bytes(array).data):08x}"


def _digest_file(path: Path, *, durable: bool = False) -> StoredFile:
    crc = size = 0
    with path.open("rb") as file:
        while chunk := file.read(4 << 20):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
        if durable:
            os.fsync(file.fileno())
    return StoredFile(size, f"{crc:08x}")


def _digest_files(path: Path, folder: str) -> dict[str, StoredFile]:
    """Digests what is on disk now, and makes sure that it is on disk and not only in the system's memory."""
    files = sorted(file for file in (path / folder).rglob("*") if file.is_file())
    digests = {file.relative_to(path).as_posix(): _digest_file(file, durable=True) for file in files}
    for parent in {file.parent for file in files} | {path / folder}:
        _sync_folder(parent)
    return digests


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _encode(folder: str, leaves: dict[str, Leaf], files: dict[str, StoredFile], metadata: str) -> bytes:
    """Two lines: the manifest, and the SHA-256 of the first line."""
    body = {
        "format": FORMAT,
        "folder": folder,
        "leaves": {name: dataclasses.asdict(leaf) for name, leaf in leaves.items()},
        "files": {name: dataclasses.asdict(file) for name, file in files.items()},
        "metadata": json.loads(metadata),
    }
    line = json.dumps(body).encode()
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def _commit(path: Path, manifest: bytes) -> None:
    partial = path / f"{MANIFEST}.partial"
    with partial.open("wb") as file:
        file.write(manifest)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path / MANIFEST)
    _sync_folder(path)
    _sync_folder(path.parent)


def _remove_other_folders(path: Path, keep: str) -> None:
    """What earlier saves to this path left: the replaced checkpoint, or pieces of one that was killed."""
    for other in path.glob("arrays-*"):
        if other.name != keep:
            shutil.rmtree(other, ignore_errors=True)


def _as_json(path: Path, metadata: dict[str, Any]) -> str:
    try:
        return json.dumps(metadata)
    except TypeError as error:
        raise _not_json(path, metadata, error) from None


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


def is_finished(path: StrPath) -> bool:
    """Whether a save to this path has ever finished. What happened to the files since is the question of `verify`."""
    return (Path(path) / MANIFEST).is_file()


def read_manifest(path: StrPath) -> Manifest:
    """What the checkpoint at `path` holds, without reading the arrays.

    Raises:
      CheckpointDamagedError: If there is none, its save never finished, or the manifest was changed since.
    """
    final = Path(path).absolute()
    try:
        line, digest, rest = (final / MANIFEST).read_bytes().split(b"\n")
    except OSError as error:
        raise _no_manifest(final) from error
    except ValueError:
        raise _bad_manifest(final) from None
    if digest != hashlib.sha256(line).hexdigest().encode() or rest:
        raise _bad_manifest(final)
    body = json.loads(line)
    if body["format"] != FORMAT:
        raise _other_format(final, body["format"])
    leaves = {name: Leaf(**{**leaf, "shape": tuple(leaf["shape"])}) for name, leaf in body["leaves"].items()}
    files = {name: StoredFile(**file) for name, file in body["files"].items()}
    return Manifest(body["folder"], leaves, files, body["metadata"])


def verify(path: StrPath) -> Manifest:
    """Digests every file of a checkpoint and returns its manifest.

    Raises:
      CheckpointDamagedError: Naming each file that was changed, cut short or removed, and the leaves in it.
    """
    final, manifest = Path(path).absolute(), read_manifest(path)
    _require_whole(final, manifest, manifest.files)
    return manifest


def load(
    path: StrPath, names: Iterable[str] | None = None, targets: Mapping[str, Target] | None = None
) -> dict[str, np.ndarray | jax.Array]:
    """Reads leaves back, and hands out none whose bytes are not the ones that were saved.

    Args:
      path: Where they were saved.
      names: Which leaves; default those of `targets`, or all.
      targets: What leaves should become. Shape and dtype must be those that were saved; the placement need not be.

    Raises:
      CheckpointDamagedError: If a file that is needed was changed, cut short or removed.
      CheckpointError: If a name was not saved.
      CheckpointMismatchError: If a leaf has another shape or dtype than its target, listing all that do.
    """
    final, manifest = Path(path).absolute(), read_manifest(path)
    targets = targets or {}
    wanted = list(names) if names is not None else list(targets or manifest.leaves)
    _require_saved(final, manifest, wanted)
    require_match(final, manifest, [(name, targets[name]) for name in wanted if name in targets])
    _require_whole(final, manifest, manifest.files_of(wanted))
    values = read_leaves(final, manifest, wanted)
    return {name: place(value, targets.get(name)) for name, value in values.items()}


def read_leaves(path: Path, manifest: Manifest, names: Sequence[str]) -> dict[str, np.ndarray | jax.Array]:
    """Leaves as NumPy arrays (PRNG keys as keys), for a caller who has just digested the files with `verify`."""
    blobs = _read_blobs(path / manifest.folder, {manifest.leaves[name].place for name in names})
    hosts = {name: _unpack(manifest.leaves[name], blobs) for name in names}
    _require_same_values(path, manifest, hosts)
    return {name: _with_key(host, manifest.leaves[name].key) for name, host in hosts.items()}


def require_match(path: Path, manifest: Manifest, targets: Iterable[tuple[str, Target]]) -> None:
    """Refuses saved leaves that have another shape or dtype than what they should go into, listing all of them."""
    bad = []
    for name, target in targets:
        leaf = manifest.leaves[name]
        saved, wanted = str(leaf), _describe(target.shape, target.dtype)
        if saved != wanted and not _is_number_for(leaf, target):
            bad.append(f"{name}  saved {saved}, wanted {wanted}")
    if bad:
        raise _mismatch(path, bad)


def _is_number_for(leaf: Leaf, target: Target) -> bool:
    """Whether a Python number is to be replaced by one of its kind. The counter of a training state begins as the
    number 0 and comes out of the first step as an array of 32 bits."""
    if leaf.key is not None or leaf.shape or not getattr(target, "weak_type", False):
        return False
    return np.dtype(leaf.dtype).kind == np.dtype(target.dtype).kind


def place(value: np.ndarray | jax.Array, target: Target | None) -> np.ndarray | jax.Array:
    """`value` laid out as `target` is, if that says how."""
    sharding = getattr(target, "sharding", None)
    if sharding is None:
        return value
    if isinstance(value, jax.Array):  # a PRNG key, which cannot be indexed on the host
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _read_blobs(folder: Path, places: set[str | None]) -> dict[str, np.ndarray]:
    wanted = sorted(place for place in places if place is not None)
    if not wanted:
        return {}
    orbax = import_orbax()
    as_numpy = orbax.RestoreArgs(restore_type=np.ndarray)
    args = orbax.args.PyTreeRestore(
        item={place: 0 for place in wanted}, restore_args={place: as_numpy for place in wanted}, partial_restore=True
    )
    return _handler().restore(_as_orbax(folder), args=args)


def _unpack(leaf: Leaf, blobs: Mapping[str, np.ndarray]) -> np.ndarray:
    dtype = np.dtype(leaf.dtype)
    if leaf.place is None:
        return np.empty(leaf.shape, dtype)
    blob = blobs[leaf.place]
    if leaf.offset is None:
        return blob.view(dtype)
    count = int(np.prod(leaf.shape, dtype=np.int64))
    # A copy, so that one small leaf does not keep 16 MB of neighbours alive, and so that it is aligned.
    return np.frombuffer(blob.data, dtype, count, leaf.offset).reshape(leaf.shape).copy()


def _with_key(host: np.ndarray, key: str | None) -> np.ndarray | jax.Array:
    return host if key is None else jax.random.wrap_key_data(jnp.asarray(host), impl=key)


def _require_saved(path: Path, manifest: Manifest, names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in manifest.leaves]
    if unknown:
        raise _not_saved(path, manifest, unknown)


def _require_whole(path: Path, manifest: Manifest, files: Iterable[str]) -> None:
    bad = []
    for file in files:
        expected, problem = manifest.files[file], None
        try:
            found = _digest_file(path / file)
        except OSError as error:
            problem = error.strerror or str(error)
        else:
            if found.bytes != expected.bytes:
                problem = f"{found.bytes} bytes, were {expected.bytes}"
            elif found.digest != expected.digest:
                problem = f"digest {found.digest}, was {expected.digest}"
        if problem:
            bad.append(f"{file}  {problem}  (holds {_some(manifest.leaves_in(file)) or 'the list of arrays'})")
    if bad:
        raise _damaged(path, bad)


def _require_same_values(path: Path, manifest: Manifest, hosts: Mapping[str, np.ndarray]) -> None:
    digests = {name: _digest(host) for name, host in hosts.items()}
    bad = [
        f"{name}  digest of its values {digest}, was {manifest.leaves[name].digest}"
        for name, digest in digests.items()
        if digest != manifest.leaves[name].digest
    ]
    if bad:
        raise _damaged(path, bad)


def _as_key(leaf: Leaf) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of the PRNG key whose bits are in this leaf."""
    key = jax.eval_shape(lambda: jax.random.wrap_key_data(jnp.zeros(leaf.shape, jnp.uint32), impl=leaf.key))
    return key.shape, key.dtype


def _describe(shape: Sequence[int], dtype: Any) -> str:
    """`float32[784,10]`, or `key<fry>[]` for a PRNG key."""
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return f"{dtype if is_key else np.dtype(dtype).name}[{','.join(map(str, shape))}]"


def _some(names: Sequence[str], most: int = 4) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


# ---------------------------------------------------------------------------------------------------------------------
# What can go wrong
# ---------------------------------------------------------------------------------------------------------------------

_USE_AN_OLDER_ONE = "use the newest whole one: `rx.CheckpointManager(checkpoint, directory).restore_latest()`"


def _damaged(path: Path, bad: Sequence[str]) -> CheckpointDamagedError:
    why = "These bytes are not the ones that were saved, so nothing was restored."
    return CheckpointDamagedError(message(f"The checkpoint {path} is damaged", bad, why, [_USE_AN_OLDER_ONE]))


def _no_manifest(path: Path) -> CheckpointDamagedError:
    if any(path.glob("arrays-*")):
        why = "The manifest is written last: either the save never finished, or the file was removed."
        call, bad = f"The checkpoint {path} is incomplete", [f"{path / MANIFEST}  is missing"]
        return CheckpointDamagedError(message(call, bad, why, [_USE_AN_OLDER_ONE]))
    inside, around = _checkpoints_in(path), path.parent
    if inside:
        call, bad = f"{path} is not a checkpoint, but a directory of checkpoints", [_some([p.name for p in inside], 8)]
        ways = [
            f'`checkpoint.restore("{inside[-1]}")`',
            f'`rx.CheckpointManager(checkpoint, "{path}").restore_latest()`',
        ]
        return CheckpointDamagedError(message(call, bad, "", ways))
    if (around / MANIFEST).is_file():
        return CheckpointDamagedError(
            message(f"{path} is a part of a checkpoint", instead=[f'`checkpoint.restore("{around}")`'])
        )
    call = f"There is no checkpoint at {path}"
    bad = [f"{around} holds {_some([p.name for p in _checkpoints_in(around)], 8)}"] if _checkpoints_in(around) else []
    why = "What is there was not written by `rx.Checkpoint`." if path.exists() else ""
    return CheckpointDamagedError(message(call, bad, why, [_USE_AN_OLDER_ONE]))


def _checkpoints_in(path: Path) -> list[Path]:
    """The checkpoints in a directory, the newest last."""
    found = [other for other in path.iterdir() if is_finished(other)] if path.is_dir() else []
    return sorted(found, key=lambda other: (other / MANIFEST).stat().st_mtime)


def _bad_manifest(path: Path) -> CheckpointDamagedError:
    why = "Its content does not have the digest on its last line, so it was changed or cut short after the save."
    return CheckpointDamagedError(
        message(f"The checkpoint {path} is damaged", [f"{path / MANIFEST}"], why, [_USE_AN_OLDER_ONE])
    )


def _other_format(path: Path, found: object) -> CheckpointError:
    why = f"This replicax reads {FORMAT!r}."
    call = f"The checkpoint {path} has a format that this replicax does not read"
    return CheckpointError(message(call, [str(found)], why, ["update replicax"]))


def _not_saved(path: Path, manifest: Manifest, unknown: Sequence[str]) -> CheckpointError:
    def line(name: str) -> str:
        near = difflib.get_close_matches(name, manifest.leaves, n=1)
        return f"{name}" + (f"  (did you mean {near[0]}?)" if near else "")

    why = f"It holds {_some(list(manifest.leaves)) or 'nothing'}."
    return CheckpointError(message(f"The checkpoint {path} does not hold what was asked for", map(line, unknown), why))


def _mismatch(path: Path, bad: Sequence[str]) -> CheckpointMismatchError:
    why = "A restored value must have the shape and dtype that it was saved with; placement and sharding may differ."
    ways = ["build the objects as they were when they were saved", "leave these out of the restore"]
    return CheckpointMismatchError(message(f"The checkpoint {path} does not fit", bad, why, ways))


def _not_written(path: Path, state: str, error: Exception) -> CheckpointError:
    why = "If there was a checkpoint at this path before, it is still there and whole."
    return CheckpointError(message(f"The checkpoint {path} was not written", [f"while {state}: {error}"], why))


def _already_saving(pending: PendingSave) -> CheckpointError:
    call = f"A save to {pending.path} was asked for while an earlier one is still {pending.state}"
    return CheckpointError(message(call, instead=["wait for the first one: `pending.wait()`", "save to another path"]))


def _too_slow(pending: PendingSave, timeout: float | None) -> TimeoutError:
    return TimeoutError(f"The save to {pending.path} is not done after {timeout:g} s; it is {pending.state}.")


def _not_an_array(name: str, value: object) -> CheckpointError:
    bad = [f"{name}  {type(value).__name__} of dtype {np.asarray(value).dtype}"]
    why = "Arrays of numbers are saved; text and other Python values are not arrays."
    return CheckpointError(message("A checkpoint was given something that is not an array of numbers", bad, why))


def _deleted(name: str, array: jax.Array) -> CheckpointError:
    bad = [f"{name}  {_describe(array.shape, array.dtype)}"]
    why = "Its memory was given to a program that wrote its result there (`donate_argnums`, `RunOptions(donate=...)`)."
    ways = ["save what that program returned", "save before calling it"]
    return CheckpointError(message("A checkpoint was given an array that is no longer there", bad, why, ways))


def _lies_elsewhere(name: str, array: jax.Array) -> CheckpointError:
    bad = [f"{name}  {_describe(array.shape, array.dtype)}  {array.sharding}"]
    why = "Parts of it lie in other processes. One process writes a checkpoint, so it must be able to reach the value."
    ways = ["keep it replicated over the processes", "gather it first: `strategy.gather(value, axis=...)`"]
    return CheckpointError(message("A checkpoint was given an array that this process cannot read", bad, why, ways))


def _not_json(path: Path, metadata: dict[str, Any], error: TypeError) -> CheckpointError:
    why = f"What stands beside the arrays is written as JSON: {error}."
    ways = ["pass arrays among the arrays", "turn it into numbers, strings, lists and dicts"]
    return CheckpointError(message(f"The metadata for {path} cannot be written", [f"{metadata!r}"[:200]], why, ways))
