"""Many reads in one request of ZooKeeper (its operation ``multiRead``, since 3.6), which kazoo does not have.

One request for each node takes most of a millisecond of a client, whatever ZooKeeper needs. Each read of a request has
an answer or an error of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kazoo.client import KazooClient
from kazoo.exceptions import EXCEPTIONS
from kazoo.interfaces import IAsyncResult
from kazoo.protocol.serialization import GetChildren, GetData, MultiHeader, read_buffer, read_string
from kazoo.protocol.states import ZnodeStat

_INT = struct.Struct("!i")
_STAT = struct.Struct("!qqqqiiiqiiq")


@dataclass(frozen=True, slots=True)
class MultiRead:
    """Request for several nodes, or for the children of several."""

    reads: Sequence[GetData | GetChildren]
    type: ClassVar[int] = 22

    def serialize(self) -> bytearray:
        """Return the body."""
        body = bytearray()
        for read in self.reads:
            body += MultiHeader(read.type, False, -1).serialize() + read.serialize()
        return body + MultiHeader(-1, True, -1).serialize()

    def deserialize(self, data: bytes, offset: int) -> list[Any]:
        """Return an answer or an exception for each read."""
        found: list[Any] = []
        while True:
            header, offset = MultiHeader.deserialize(data, offset)
            if header.done:
                return found
            if header.type == GetData.type:
                value, offset = read_buffer(data, offset)
                found.append((value, ZnodeStat._make(_STAT.unpack_from(data, offset))))
                offset += _STAT.size
            elif header.type == GetChildren.type:
                (count,), offset = _INT.unpack_from(data, offset), offset + _INT.size
                names = []
                for _ in range(count):
                    name, offset = read_string(data, offset)
                    names.append(name)
                found.append(names)
            else:
                (code,), offset = _INT.unpack_from(data, offset), offset + _INT.size
                found.append(EXCEPTIONS[code]())


def read_together(client: KazooClient, reads: Sequence[GetData | GetChildren]) -> IAsyncResult:
    """Ask for all of them; the result is as :meth:`MultiRead.deserialize` returns it."""
    result: IAsyncResult = client.handler.async_result()
    client._call(MultiRead(reads), result)
    return result
