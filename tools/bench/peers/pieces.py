"""Cut a folder into pieces of limited size and put it together again, checked: for a machine that takes little at once.

``python -m tools.bench.peers.pieces split FOLDER PIECES --mib 48`` writes PIECES/00/peers.00, PIECES/01/peers.01, ...
and, beside each, sums.json: the SHA-256 of every piece. ``join PIECES FOLDER`` wants all of them below PIECES.
"""

import argparse
import hashlib
import json
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

NAME, SUMS = "peers", "sums.json"
_BLOCK = 2**20


class _Writer:
    """A stream that goes on in the next piece when one is full."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size, self.sums = folder, size, {}  # type: tuple[Path, int, dict[str, str]]
        self._file: BinaryIO | None = None
        self._digest, self._left = hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        """All of ``data``, over as many pieces as it takes."""
        rest = memoryview(data)
        while rest:
            if self._left == 0:
                self._next()
            assert self._file is not None
            now, rest = rest[: self._left], rest[self._left :]
            self._file.write(now)
            self._digest.update(now)
            self._left -= len(now)
        return len(data)

    def _next(self) -> None:
        self.close()
        number = f"{len(self.sums):02d}"
        (self.folder / number).mkdir(parents=True)
        self._file = (self.folder / number / f"{NAME}.{number}").open("wb")
        self._digest, self._left = hashlib.sha256(), self.size

    def close(self) -> None:
        """End the piece in hand."""
        if self._file is not None:
            self._file.close()
            self.sums[Path(self._file.name).name] = self._digest.hexdigest()
            self._file = None


def split(folder: Path, pieces: Path, size: int) -> list[Path]:
    """The pieces, each of at most ``size`` bytes, in folders of their own."""
    writer = _Writer(pieces, size)
    with tarfile.open(fileobj=cast(BinaryIO, writer), mode="w|") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, arcname=path.name)
    writer.close()
    written = sorted(pieces.glob(f"*/{NAME}.*"))
    for piece in written:
        (piece.parent / SUMS).write_text(json.dumps(writer.sums, indent=1) + "\n", encoding="utf-8")
    return written


class _Reader:
    """All pieces, one after the other, as one stream."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._blocks, self._rest = _blocks(paths), b""

    def read(self, size: int) -> bytes:
        """``size`` bytes, fewer at the end."""
        while len(self._rest) < size and (block := next(self._blocks, b"")):
            self._rest += block
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken


def _blocks(paths: Sequence[Path]) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                yield block


def join(pieces: Path, folder: Path) -> list[Path]:
    """The folder's files.

    Raises:
        SystemExit: a piece is missing or damaged; says which.
    """
    found = {path.name: path for path in pieces.rglob(f"{NAME}.*")}
    sums = next(iter(pieces.rglob(SUMS)), None)
    if sums is None:
        sys.exit(f"{pieces}: no {SUMS} there")
    expected: dict[str, str] = json.loads(sums.read_text(encoding="utf-8"))
    bad = [name for name in expected if name not in found or _sum(found[name]) != expected[name]]
    if bad:
        sys.exit(f"{pieces}: missing or damaged: {', '.join(bad)}; carry these again")
    folder.mkdir(parents=True, exist_ok=True)
    stream = cast(BinaryIO, _Reader([found[name] for name in sorted(expected)]))
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        archive.extractall(folder, filter="data")
    return sorted(folder.iterdir())


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(argv: Sequence[str] | None = None) -> None:
    """``split`` or ``join``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    cut = what.add_parser("split")
    cut.add_argument("folder", type=Path)
    cut.add_argument("pieces", type=Path, help="a folder that is new or empty")
    cut.add_argument("--mib", type=int, default=48, help="of a piece, at most (default: %(default)s)")
    put = what.add_parser("join")
    put.add_argument("pieces", type=Path)
    put.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    if args.what == "split":
        paths = split(args.folder, args.pieces, args.mib * 2**20)
    else:
        paths = join(args.pieces, args.folder)
    for path in paths:
        print(f"{path.stat().st_size / 2**20:8.1f} MiB  {path}")


if __name__ == "__main__":
    main()
