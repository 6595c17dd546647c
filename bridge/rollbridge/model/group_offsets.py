"""Offsets of consumer groups that a transaction commits together with its records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Final, NamedTuple

from rollbridge.model.errors import InvalidRequestError
from rollbridge.model.mapper import StoredAs
from rollbridge.model.names import Partition
from rollbridge_schemas import Datum

GROUP_CHARACTERS_MAX: Final = 1_000
TOPIC_CHARACTERS_MAX: Final = 249
PARTITIONS_MAX: Final = 10_000
"""Most offsets of a transaction; where their topics have long names, the manifest's size allows fewer."""
_INT_MAX: Final = (1 << 31) - 1
_LONG_MAX: Final = (1 << 63) - 1


def _by_topic(group: GroupOffsets) -> Datum:
    topics: dict[str, list[Datum]] = {}
    for (topic, partition), offset in group.offsets.items():
        topics.setdefault(topic, []).append({"partition": partition, "offset": offset})
    return {"topics": [{"topic": topic, "partitions": entries} for topic, entries in topics.items()]}


def _offsets_of(datum: Datum) -> dict[Partition, int]:
    return {
        (topic["topic"], entry["partition"]): entry["offset"]
        for topic in datum["topics"]
        for entry in topic["partitions"]
    }


class GroupMember(NamedTuple):
    """Who commits offsets: a member of a group in one of its generations, or (the defaults) somebody outside of it."""

    group_id: str
    generation: int = -1
    member_id: str = ""
    instance_id: str | None = None


@dataclass(frozen=True, slots=True)
class GroupOffsets:
    """Offsets of one consumer group, and who of it commits them.

    Attributes:
        group_id: The group.
        offsets: Topic and partition to the offset of the next record to read.
        generation: Generation in which the member read; -1 for somebody outside of the group.
        member_id: The member; empty for somebody outside of the group.
        instance_id: Its static id, if it has one.

    Raises:
        InvalidRequestError: something is out of its range.
    """

    group_id: Annotated[str, StoredAs(fields=("group",))]
    offsets: Annotated[Mapping[Partition, int], StoredAs(write=_by_topic, read=_offsets_of)] = field(hash=False)
    generation: int = -1
    member_id: Annotated[str, StoredAs(fields=("member",))] = ""
    instance_id: Annotated[str | None, StoredAs(fields=("instance",))] = None

    def __post_init__(self) -> None:
        names = (self.group_id, self.member_id, self.instance_id or "")
        if not self.group_id or max(map(len, names)) > GROUP_CHARACTERS_MAX:
            raise InvalidRequestError(
                f"a consumer group, its members and their static ids have names of 1 to {GROUP_CHARACTERS_MAX} "
                "characters; nothing was sent"
            )
        if not -1 <= self.generation <= _INT_MAX:
            raise InvalidRequestError(f"{self.generation} is not a generation of a consumer group; nothing was sent")
        if not 0 < len(self.offsets) <= PARTITIONS_MAX:
            raise InvalidRequestError(
                f"{len(self.offsets)} offsets of group {self.group_id} were given; 1 to {PARTITIONS_MAX} are possible; "
                "nothing was sent"
            )
        for (topic, partition), offset in self.offsets.items():
            if not 0 < len(topic) <= TOPIC_CHARACTERS_MAX or not 0 <= partition <= _INT_MAX:
                raise InvalidRequestError(f"there can be no partition {partition} of {topic!r:.300}; nothing was sent")
            if not 0 <= offset <= _LONG_MAX:
                raise InvalidRequestError(
                    f"{offset} is not an offset of {topic}, partition {partition}; nothing was sent"
                )

    @property
    def member(self) -> GroupMember:
        """Who commits them."""
        return GroupMember(self.group_id, self.generation, self.member_id, self.instance_id)

    def joined(self, later: GroupOffsets) -> GroupOffsets:
        """Return these, with those that the same group gave later."""
        return replace(later, offsets={**self.offsets, **later.offsets})


_METADATA: Final = b"CGMDv2:"


def parse_group_metadata(metadata: object) -> GroupMember:
    """Return who it is that confluent-kafka's ``consumer_group_metadata()`` gives.

    A group's name alone is taken as well, for somebody outside of the group.

    Raises:
        InvalidRequestError: it is neither.

    Source: librdkafka, ``rd_kafka_consumer_group_metadata_write``.
    """
    if isinstance(metadata, str):
        return GroupMember(metadata)
    if isinstance(metadata, bytes) and metadata.startswith(_METADATA):
        head = len(_METADATA)
        generation = int.from_bytes(metadata[head : head + 4], "little", signed=True)
        parts = metadata[head + 4 :].split(b"\0", 2)
        if len(parts) == 3 and len(parts[2]) >= 1:
            group, member, rest = parts
            try:
                instance = rest[1:].rstrip(b"\0").decode() if rest[:1] == b"\0" else None
                return GroupMember(group.decode(), generation, member.decode(), instance)
            except UnicodeDecodeError as fault:
                raise InvalidRequestError(f"group_metadata holds a name that is not text: {fault}") from fault
    raise InvalidRequestError(
        "group_metadata must be what consumer_group_metadata() of a consumer gives, or the name of a consumer group; "
        "nothing was sent"
    )
