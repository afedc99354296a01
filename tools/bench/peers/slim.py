"""Blank other GPUs' device code in a folder of wheels: ``python -m tools.bench.peers.slim WHEELS --arch 90``.

TransformerEngine's library holds each kernel for eight kinds of GPU; the seven that are not there are most of its 264
MiB. Their bytes become zeros, which compress to nothing; headers, and the code that the driver picks on that GPU, stay
as they are. The wheel is written over, its RECORD with it.
"""

import argparse
import base64
import hashlib
import struct
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

_FATBIN, _SECTION = b"\x50\xed\x55\xba", ".nv_fatbin"


def blanked(library: bytes, arch: int) -> bytes:
    """An ELF library without the device code of other compute capabilities than ``arch`` (90 for 9.0).

    One that has none for ``arch`` stays as it is.
    """
    images = list(_images(library))
    if arch not in {found for _, _, found in images}:
        return library
    changed = bytearray(library)
    for start, size, found in images:
        if found != arch:
            changed[start : start + size] = bytes(size)
    return bytes(changed)


def _images(library: bytes) -> Iterator[tuple[int, int, int]]:
    """(offset, bytes, compute capability) of each kernel image in the library's fat binaries."""
    for offset, size in _sections(library):
        place, end = offset, offset + size
        while (place := library.find(_FATBIN, place, end)) >= 0:
            header, content = struct.unpack_from("<HQ", library, place + 6)
            place, last = place + header, place + header + content
            while place < last:
                header, content = struct.unpack_from("<IQ", library, place + 4)
                (arch,) = struct.unpack_from("<I", library, place + 28)
                yield place + header, content, arch
                place += header + content


def _sections(library: bytes) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of the sections that hold fat binaries, by the ELF header's table of sections."""
    if library[:5] != b"\x7fELF\x02":
        return
    (table,) = struct.unpack_from("<Q", library, 40)
    width, count, names = struct.unpack_from("<HHH", library, 58)
    headers = [struct.unpack_from("<II8xQQQ", library, table + i * width) for i in range(count)]
    first_name = headers[names][3]
    for name, _, _, offset, size in headers:
        text = library[first_name + name : library.index(b"\0", first_name + name)]
        if text.decode() == _SECTION:
            yield offset, size


def slim(wheel: Path, arch: int) -> None:
    """Write ``wheel`` anew without other GPUs' code; a wheel without any stays as it is."""
    with zipfile.ZipFile(wheel) as old:
        contents = {info.filename: old.read(info) for info in old.infolist() if not info.is_dir()}
    libraries = {name: blanked(data, arch) for name, data in contents.items() if name.endswith(".so")}
    changed = {name: data for name, data in libraries.items() if data != contents[name]}
    if not changed:
        return
    contents |= changed
    record = next(name for name in contents if name.endswith(".dist-info/RECORD"))
    lines = [_record(line, changed) for line in contents[record].decode().splitlines()]
    contents[record] = "".join(line + "\n" for line in lines).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        for name, data in contents.items():
            new.writestr(name, data)


def _record(line: str, changed: dict[str, bytes]) -> str:
    """A line of RECORD, with the new digest of a changed file."""
    name = line.rsplit(",", 2)[0]
    if name not in changed:
        return line
    digest = base64.urlsafe_b64encode(hashlib.sha256(changed[name]).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(changed[name])}"


def main(argv: Sequence[str] | None = None) -> None:
    """Every wheel of a folder; prints the sizes that changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path)
    parser.add_argument("--arch", type=int, required=True, help="compute capability without the dot: 90 for an H100")
    args = parser.parse_args(argv)
    for wheel in sorted(args.wheels.glob("*.whl")):
        before = wheel.stat().st_size
        slim(wheel, args.arch)
        if wheel.stat().st_size != before:
            print(f"{before / 2**20:.1f} -> {wheel.stat().st_size / 2**20:.1f} MiB  {wheel.name}")


if __name__ == "__main__":
    main()
