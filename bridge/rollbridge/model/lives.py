"""Lives of a stream: what is kept of a deleted one, so that nothing of two lives of a name can be taken for each other.

A stream that is created under the name of a deleted one goes on with epochs, sequence ids and partition numbers above
all that were ever used there. Topics of segments and of the buffer, DLSNs, SNs, saved positions, placements in COMMIT
records, offsets by partition and the reference epochs of BEGIN frames then differ between the two, and a paused process
that acts on a name which it knew meets nothing.

What is kept of a deleted stream is an empty node below its scope, ``former/STREAM#EPOCH.SEQUENCE.PARTITION``: the first
numbers that it has not used. Its name says all, so that two leaders of a scope's groups never overwrite what the other
knows. When there are many, some are folded into a *floor*, ``former/#EPOCH.SEQUENCE.PARTITION``, above which every name
begins. Of several nodes of a name, or floors, the highest number counts in each respect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from rollbridge.model.epochs import EpochHistory
from rollbridge.model.errors import InvalidRequestError
from rollbridge.model.identifiers import EPOCH_MAX, SegmentId
from rollbridge.model.lineage import lineage
from rollbridge.model.names import StreamName
from rollbridge.model.sn import LONG_MAX, sequence_bases

PARTITION_MAX: Final = (1 << 31) - 1 - (1 << 24)
"""The last number from which a stream may begin to count its segments; Kafka's protocol has 31 bits for it."""
FORMER_MAX: Final = 1_000
"""Nodes of a scope's deleted streams; their names stay far below ZooKeeper's limit of 1 MiB for a list."""
FOLDED_AT_ONCE: Final = 500
"""How many of them are folded in one ZooKeeper multi."""
SEQUENCE_SLACK: Final = 1 << 32
"""More records than are still written plainly between the look at the ends of a stream and the end of its topics."""
UNSEEN_RECORDS: Final = 1 << 40
"""More records than there are in a segment whose end can not be told, because its topic is gone."""


@dataclass(frozen=True, slots=True)
class Former:
    """The first numbers that the former lives of a stream have not used.

    Attributes:
        epoch: Above every epoch that there was.
        sequence: Above every sequence id that was given out.
        partition: Above every partition number of a segment.
    """

    epoch: int = 0
    sequence: int = 0
    partition: int = 0

    def __or__(self, other: Former) -> Former:
        """What neither has used."""
        return Former(
            max(self.epoch, other.epoch), max(self.sequence, other.sequence), max(self.partition, other.partition)
        )

    def node(self, stream: str = "") -> str:
        """The name of the node that keeps this of a stream, by its name in its scope; of a floor without."""
        return f"{stream}#{self.epoch}.{self.sequence}.{self.partition}"


def parse_former(node: str) -> tuple[str, Former]:
    """The inverse of :meth:`Former.node`; a node that is none of ours says nothing."""
    stream, _, numbers = node.partition("#")
    parts = numbers.split(".")  # a node of a version before has two
    if len(parts) not in (2, 3) or not all(part.isascii() and part.isdigit() for part in parts):
        return node, Former()
    return stream, Former(*map(int, parts))


def former_among(nodes: Iterable[str], name: StreamName) -> Former:
    """Above what a stream begins, going by the nodes that are kept in its scope."""
    found = Former()
    for node in nodes:
        stream, known = parse_former(node)
        if stream in ("", name.stream):
            found |= known
    return found


def former_of(history: EpochHistory, ends: Mapping[SegmentId, int]) -> Former:
    """What to keep of a stream that is deleted.

    Args:
        history: Its epochs.
        ends: Where those of its segments end that were not sealed, as far as that is known.

    Raises:
        InvalidRequestError: no numbers are left for another stream of this name.
    """
    bases = sequence_bases(history)
    last = 0 if history.foundation is None else max(history.foundation.ends)
    for segment in history.segments():
        end = history.sealed_end(segment)
        last = max(last, bases.get(segment, 0) + (ends.get(segment, UNSEEN_RECORDS) if end is None else end))
    found = Former(history.next_epoch, last + SEQUENCE_SLACK, 1 + max(lineage(history).segments))
    if found.epoch > EPOCH_MAX or found.sequence > LONG_MAX - UNSEEN_RECORDS or found.partition > PARTITION_MAX:
        raise InvalidRequestError(
            "all numbers of epochs, records or segments of this name are used up; choose another name"
        )
    return found


def fold(nodes: Iterable[str]) -> tuple[Former, list[str]]:
    """A floor for the deleted streams that have used the least, and the nodes that it stands for; none if few are kept.

    Floors that were there before are among them, so that one remains.
    """
    known = sorted(((*parse_former(node), node) for node in nodes), key=lambda row: (row[0] != "", row[1].epoch))
    if len(known) < FORMER_MAX:
        return Former(), []
    floor = Former()
    for _, former, _ in known[:FOLDED_AT_ONCE]:
        floor |= former
    return floor, [node for _, _, node in known[:FOLDED_AT_ONCE] if node != floor.node()]
