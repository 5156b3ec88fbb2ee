"""Pack a model into a store, one expert or piece of a table at a time: atomic, resumable, in bounded memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from filelock import FileLock, Timeout
from jaxtyping import Float32, UInt8
from safetensors import SafetensorError
from safetensors.torch import save_file

from stickymoe import files
from stickymoe.errors import StoreError, require
from stickymoe.locality.plan import bytes_text
from stickymoe.reading import parse_json, reason
from stickymoe.runtime.checkpoints import Checkpoint
from stickymoe.runtime.formats import PRECISIONS, ExpertLayout, Precision
from stickymoe.runtime.store import DENSE, EXPERTS, ROWS, Contents, Entry, Store, checksum, write_index

JOURNAL, ROW_JOURNAL = "packing.jsonl", "packing-rows.jsonl"
Plan = list[list[Precision]]  # the precision of every expert of every pool
LatePlan = Callable[[Path], Plan]  # from a folder that has the dense part
Progress = Callable[[int], None]


def contents_of(source: Checkpoint) -> Contents:
    """What a store of a checkpoint holds."""
    return Contents(
        kind=source.kind,
        name=source.name,
        fingerprint=source.fingerprint,
        spec=source.spec,
        n_pools=source.n_layers,
        n_experts=source.n_experts,
        top_k=source.top_k,
        layers_per_pool=source.layers_per_pool,
        rows=source.rows,
    )


def default_precision(source: Checkpoint) -> Precision:
    """The one that loses nothing: bf16 if the experts are saved so, otherwise fp32."""
    return "bf16" if source.expert(0, 0)[0].dtype == torch.bfloat16 else "fp32"


def uniform(source: Checkpoint, name: str) -> Plan:
    """The same precision, by its name, for all experts."""
    require(name in PRECISIONS, "experts", name, f"one of {', '.join(PRECISIONS)}")
    precision = next(p for p in PRECISIONS if p == name)
    return [[precision] * source.n_experts for _ in range(source.n_layers)]


def planned_bytes(source: Checkpoint, plan: Plan) -> int:
    """Bytes of all experts of a plan."""
    sizes = {p: ExpertLayout(source.spec, p).nbytes for p in PRECISIONS}
    return sum(sizes[precision] for pool in plan for precision in pool)


def pack(source: Checkpoint, folder: Path, plan: Plan | LatePlan, *, progress: Progress | None = None) -> Store:
    """Write a store to the new folder `folder`; a packing that was interrupted is resumed."""
    _require_new(folder)
    partial = folder.with_name(f".{folder.name}.packing")
    lock = folder.with_name(f".{folder.name}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=0):
            _require_new(folder)  # another process may have finished it meanwhile
            _start_anew_unless(partial, contents_of(source))
            save_file(dict(source.dense()), partial / DENSE)
            source.copy_config(partial)
            chosen = plan(partial) if callable(plan) else plan
            _require_space(source, chosen, partial)
            _write(source, partial, chosen, progress)
            files.publish_folder(partial, folder)
        lock.unlink(missing_ok=True)
    except Timeout as e:
        raise StoreError(f"{folder} is being packed by another process; wait for it, or choose another folder.") from e
    except (OSError, SafetensorError) as e:
        again = f"Make room and pack again, which resumes, or delete {partial}"
        raise StoreError(f"{folder} cannot be written ({reason(e)}). {again}.") from e
    return Store.open(folder)


def _require_new(folder: Path) -> None:
    if folder.exists() or folder.is_symlink():
        raise StoreError(f"{folder} exists already, expected a new folder. Choose another one, or delete it first.")


def _start_anew_unless(partial: Path, contents: Contents) -> None:
    """Delete what an earlier packing left, unless it packed the same model: its config must not be mixed with ours."""
    header = next(_lines(partial / JOURNAL), None)
    same = isinstance(header, dict) and header.get("contents") == _as_read(asdict(contents))
    if partial.exists() and not same:
        shutil.rmtree(partial)
    partial.mkdir(exist_ok=True)


def _as_read(values: Any) -> Any:
    """Values as they are read back from JSON."""
    return json.loads(json.dumps(values))


def _require_space(source: Checkpoint, plan: Plan, partial: Path) -> None:
    written = [partial / name for name in (EXPERTS, ROWS)]
    done = sum(path.stat().st_size for path in written if path.is_file())
    needed = planned_bytes(source, plan) + contents_of(source).row_layout.nbytes - done
    free = shutil.disk_usage(partial).free
    if needed > free:
        raise StoreError(
            f"{partial.parent} has {bytes_text(free)} free, but the experts{' and rows' * bool(source.rows)} need "
            f"{bytes_text(needed)}. Choose another folder, or fewer bits with --experts."
        )


def _write(source: Checkpoint, partial: Path, plan: Plan, progress: Progress | None) -> None:
    contents = contents_of(source)
    header = _as_read({"schema": contents.schema, "contents": asdict(contents), "plan": plan})
    places = [(pool, e) for pool in range(len(plan)) for e in range(len(plan[pool]))]

    def write_expert(data: BinaryIO, n: int) -> Entry:
        pool, e = places[n]
        return _write_expert(source, data, plan[pool][e], pool, e)

    entries = iter(_write_file(partial / EXPERTS, partial / JOURNAL, header, len(places), write_expert, progress))
    by_pool = [[next(entries) for _ in pool] for pool in plan]
    write_index(partial, contents, by_pool, _write_rows(source, partial, header) if contents.rows else [])
    for journal in (JOURNAL, ROW_JOURNAL):
        (partial / journal).unlink(missing_ok=True)


def _write_rows(source: Checkpoint, partial: Path, header: dict[str, Any]) -> list[Entry]:
    layout = contents_of(source).row_layout
    pieces = list(layout.pieces())

    def read(name: str, first: int, stop: int) -> Float32[np.ndarray, "rows width"]:
        return source.table_rows(name, first, stop).float().numpy()

    def write_piece(data: BinaryIO, n: int) -> Entry:
        return _write_data(data, layout.encode(pieces[n], read), "fp32")

    return _write_file(partial / ROWS, partial / ROW_JOURNAL, header, len(pieces), write_piece, None)


def _write_file(
    path: Path,
    journal: Path,
    header: dict[str, Any],
    n: int,
    write: Callable[[BinaryIO, int], Entry],
    progress: Progress | None,
) -> list[Entry]:
    """Write n parts of a file one after another, except those that an earlier packing wrote whole."""
    entries = list(_resumable(journal, path, header))
    # Written again, without lines that were cut or are not used.
    files.write_text(journal, "".join(json.dumps(line) + "\n" for line in (header, *map(_values, entries))))
    with path.open("r+b" if entries else "wb") as data, journal.open("a", encoding="utf-8") as log:
        _keep(data, entries)
        for done in range(n):
            if done >= len(entries):
                entries.append(write(data, done))
                data.flush()  # the journal must not be ahead of the data
                log.write(json.dumps(_values(entries[-1])) + "\n")
                log.flush()
            if progress is not None:
                progress(1)
    return entries


def _write_expert(source: Checkpoint, data: BinaryIO, precision: Precision, pool: int, expert: int) -> Entry:
    return _write_data(data, ExpertLayout(source.spec, precision).encode(source.expert(pool, expert)), precision)


def _write_data(data: BinaryIO, encoded: UInt8[np.ndarray, " bytes"], precision: Precision) -> Entry:
    entry = Entry(precision, data.tell(), encoded.nbytes, checksum(encoded))
    data.write(encoded.data)
    return entry


def _values(entry: Entry) -> list[Any]:
    return list(asdict(entry).values())


def _lines(journal: Path) -> Iterator[Any]:
    """The values of a journal, up to a line that was cut."""
    if not journal.is_file():
        return
    for line in journal.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield parse_json(line, journal, StoreError)
        except StoreError:
            return


def _resumable(journal: Path, path: Path, header: dict[str, Any]) -> Iterator[Entry]:
    """The parts of a file that an earlier packing of the same model and plan wrote whole."""
    lines = _lines(journal)
    if next(lines, None) != header or not path.is_file():
        return
    with path.open("rb") as data:
        for line in lines:
            try:
                entry = Entry(*line)
                whole = checksum(data.read(entry.nbytes)) == entry.checksum
            except (TypeError, ValueError):  # not a line of ours
                return
            if not whole:
                return
            yield entry


def _keep(data: BinaryIO, entries: list[Entry]) -> None:
    """Cut what follows the whole parts."""
    data.seek(sum(entry.nbytes for entry in entries))
    data.truncate()
