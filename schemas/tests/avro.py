"""Avro binary written down from the specification, slow and obvious, to check the codecs against.

Source: https://avro.apache.org/docs/1.11.1/specification/#binary-encoding
"""

from __future__ import annotations

import struct
from typing import Any


def encode_long(value: int) -> bytes:
    """Zig-zag, then seven bits at a time, least significant first."""
    left = (value << 1) ^ (value >> 63)
    out = bytearray()
    while left > 0x7F:
        out.append(left & 0x7F | 0x80)
        left >>= 7
    out.append(left)
    return bytes(out)


def encode(schema: Any, value: Any) -> bytes:
    """``value`` in binary; unions are told apart by None alone, which is enough for our schemas."""
    match schema:
        case list():
            branch = [item == "null" for item in schema].index(value is None)
            return encode_long(branch) + encode(schema[branch], value)
        case {"type": "record", "fields": fields}:
            return b"".join(encode(field["type"], value[field["name"]]) for field in fields)
        case {"type": "array", "items": items}:
            block = encode_long(len(value)) + b"".join(encode(items, item) for item in value) if value else b""
            return block + encode_long(0)
        case {"type": "enum", "symbols": symbols}:
            return encode_long(symbols.index(value))
        case "null":
            return b""
        case "boolean":
            return b"\1" if value else b"\0"
        case "int" | "long":
            return encode_long(value)
        case "double":
            return struct.pack("<d", value)
        case "string":
            text: bytes = value.encode()
            return encode_long(len(text)) + text
    raise AssertionError(f"the schemas use no {schema!r}")
