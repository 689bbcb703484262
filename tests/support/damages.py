"""Damage the bytes of a file at random."""

import json
import struct


def with_header(data: bytes, change) -> bytes:
    """Return a safetensors file with its JSON header replaced by `change(header)`, a dict or bytes."""
    (length,) = struct.unpack("<Q", data[:8])
    header = change(json.loads(data[8 : 8 + length]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def random_tensor(header: dict, rng) -> str:
    """Return the name of a random tensor in the header of a safetensors file."""
    return rng.choice(sorted(k for k in header if k != "__metadata__"))


DAMAGES = (
    "bytes",
    "header bytes",
    "cut",
    "replaced",
    "length",
    "insert",
    "offsets",
    "dtype",
    "shape",
    "name",
    "metadata",
)
# Contents that replace a whole file.
REPLACEMENTS = (
    b"",
    b"5",
    b"null",
    b"[]",
    b"[" * 100_000,
    b"\xff\xfe",
    b"PK\3\4" + bytes(40),
    b"\x93NUMPY\x01\x00",
)


def mutated(data: bytes, rng) -> bytes:  # noqa: C901
    """Return `data` with one of `DAMAGES`. Where it needs the header of safetensors, other files get random bytes."""
    damage = rng.choice([*DAMAGES])
    damaged = bytearray(data)
    safetensors = data[8:9] == b"{"
    if damage == "cut":
        return data[: rng.randrange(len(data))]
    if damage == "replaced":
        return rng.choice(REPLACEMENTS)
    if damage == "insert":
        offset = rng.randrange(len(data))
        return data[:offset] + rng.randbytes(rng.choice((1, 8, 100))) + data[offset:]
    if damage == "bytes" or not safetensors:
        for _ in range(rng.choice((1, 3, 50))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        if not safetensors:  # a zip has its pickle at the start and its directory at the end
            near = min(3000, len(data))
            for _ in range(5):
                damaged[rng.choice((rng.randrange(near), -1 - rng.randrange(near)))] ^= (
                    1 << rng.randrange(8)
                )
        return bytes(damaged)
    (length,) = struct.unpack("<Q", data[:8])
    if damage == "header bytes":
        for _ in range(rng.choice((1, 3))):
            damaged[8 + rng.randrange(length)] = rng.randrange(32, 127)
        return bytes(damaged)
    if damage == "length":
        lengths = (2**62, 2**64 - 1, 2**31, 0, 1, length - 1, length + 1, len(data))
        return struct.pack("<Q", rng.choice(lengths)) + data[8:]

    def change(header):
        entry = header[random_tensor(header, rng)]
        if damage == "offsets":
            a, b = entry["data_offsets"]
            offsets = ([b, a], [a, 2**62], [-4, b], [a + 4, b], [0, 2**64], [a, b + 4], [0, 0], [])
            entry["data_offsets"] = rng.choice(offsets)
        elif damage == "dtype":
            entry["dtype"] = rng.choice(
                ("I64", "BOOL", "F8_E4M3", "F4", "U8", "C64", "evil", "", None, 3)
            )
        elif damage == "shape":
            shapes = (
                [],
                [2**62],
                [-1],
                [2**31, 2**31, 2**31],
                entry["shape"] + [1],
                "x",
                [[1]],
                [0],
            )
            entry["shape"] = rng.choice(shapes)
        elif damage == "name":
            old = random_tensor(header, rng)
            header[rng.choice(("../../x", "", "a" * 10_000, "\u0000", "blocks.99.x"))] = header.pop(
                old
            )
        else:
            metadata = header.setdefault("__metadata__", {})
            metadata[rng.choice(sorted(metadata) or ["x"])] = rng.choice(
                (
                    "null",
                    "[]",
                    "{}",
                    '"x"',
                    "[" * 50_000,
                    "1e999",
                    "-1",
                    '{"depth": 1e9}',
                    '{"embed_dim": 1000000000}',
                )
            )
        return header

    return with_header(data, change)
