"""Offsets of consumer groups that a transaction commits together with its records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Final, NamedTuple

from rollbridge.base.errors import InvalidRequestError
from rollbridge.base.mapper import StoredAs
from rollbridge.stream.names import Partition
from rollbridge_schemas import Datum

GROUP_CHARACTERS_MAX: Final = 1_000
TOPIC_CHARACTERS_MAX: Final = 249
PARTITIONS_MAX: Final = 10_000
"""Most offsets of a transaction; where their topics have long names, the manifest's size allows fewer."""
METADATA_CHARACTERS_MAX: Final = 4_096
"""Longest metadata of an offset, in UTF-16 code units: ``offset.metadata.max.bytes`` of brokers, which counts these."""
METADATA_BYTES_MAX: Final = 256 * 1024
"""Most bytes of the metadata of a transaction's offsets, together, in UTF-8: with notes they fit into a savepoint."""
NO_EPOCH: Final = -1
"""Unknown leader epoch: brokers do not check for divergence."""
_INT_MAX: Final = (1 << 31) - 1
_LONG_MAX: Final = (1 << 63) - 1


class OffsetDetails(NamedTuple):
    """Details committed with an offset.

    Attributes:
        leader_epoch: Epoch of the leader from which the record before it was read; :data:`NO_EPOCH` if unknown.
        metadata: The committer's text; brokers do not tell none from the empty one.
    """

    leader_epoch: int = NO_EPOCH
    metadata: str = ""


NO_DETAILS: Final = OffsetDetails()


def is_too_large(metadata: str) -> bool:
    """Return whether a broker with default settings would refuse an offset's metadata for its length."""
    # A character takes one unit or two, so few texts need a count.
    length = len(metadata)
    if METADATA_CHARACTERS_MAX // 2 < length <= METADATA_CHARACTERS_MAX and not metadata.isascii():
        length += sum(character > "\uffff" for character in metadata)
    return length > METADATA_CHARACTERS_MAX


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _by_topic(group: GroupOffsets) -> Datum:
    topics: dict[str, list[Datum]] = {}
    for (topic, partition), offset in group.offsets.items():
        topics.setdefault(topic, []).append({"partition": partition, "offset": offset})
    return {"topics": [{"topic": topic, "partitions": entries} for topic, entries in topics.items()]}


def details_to_data(groups: Sequence[GroupOffsets]) -> list[Datum]:
    """Return the details of all offsets of a frame, in the frame's order; none if none has any."""
    if not any(group.details for group in groups):
        return []
    return [
        group.details.get((topic["topic"], entry["partition"]), NO_DETAILS)._asdict()
        for group in groups
        for topic in _by_topic(group)["topics"]
        for entry in topic["partitions"]
    ]


def with_details(groups: Sequence[GroupOffsets], data: Sequence[Datum], details: Sequence[Datum]) -> list[GroupOffsets]:
    """Return the groups of a frame with the details that it holds.

    Args:
        groups: The groups.
        data: What they were read from.
        details: Those of all their offsets, in order.

    Raises:
        InvalidRequestError: there are more or fewer of them than offsets, or one that there cannot be.
    """
    places = [list(_places(datum)) for datum in data]
    if sum(map(len, places)) != len(details):
        raise InvalidRequestError(f"{len(details)} details of {sum(map(len, places))} offsets; nothing was sent")
    left = iter(details)
    return [
        replace(group, details={where: OffsetDetails(**next(left)) for where in named})
        for group, named in zip(groups, places, strict=True)
    ]


def _places(datum: Datum) -> Iterator[Partition]:
    return ((topic["topic"], entry["partition"]) for topic in datum["topics"] for entry in topic["partitions"])


def metadata_bytes(groups: Iterable[GroupOffsets]) -> int:
    """Return the bytes of all metadata of offsets, in UTF-8."""
    return sum(len(item.metadata.encode()) for group in groups for item in group.details.values())


def _offsets_of(datum: Datum) -> dict[Partition, int]:
    return {
        (topic["topic"], entry["partition"]): entry["offset"]
        for topic in datum["topics"]
        for entry in topic["partitions"]
    }


class GroupMember(NamedTuple):
    """Committer of offsets: a member of a group in one generation, or (the defaults) a client outside of the group."""

    group_id: str
    generation: int = -1
    member_id: str = ""
    instance_id: str | None = None


@dataclass(frozen=True, slots=True)
class GroupOffsets:
    """Offsets of one consumer group, and their committer.

    Attributes:
        group_id: The group.
        offsets: Topic and partition to the offset of the next record to read.
        generation: Generation in which the member read; -1 outside of the group.
        member_id: The member; empty outside of the group.
        instance_id: Its static id, if it has one.
        details: Details committed with offsets; those without are left out.

    Raises:
        InvalidRequestError: a value is out of its range.
        InvalidRequestError: an offset's metadata is longer than brokers accept.
    """

    group_id: Annotated[str, StoredAs(fields=("group",))]
    offsets: Annotated[Mapping[Partition, int], StoredAs(write=_by_topic, read=_offsets_of)] = field(hash=False)
    generation: int = -1
    member_id: Annotated[str, StoredAs(fields=("member",))] = ""
    instance_id: Annotated[str | None, StoredAs(fields=("instance",))] = None
    # They follow all groups of a frame, since no record inside of another one grows.
    details: Mapping[Partition, OffsetDetails] = field(default_factory=dict, hash=False)

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
        if self.details:
            self._check_details()

    def _check_details(self) -> None:
        for where, item in self.details.items():
            topic, partition = where
            if where not in self.offsets:
                raise InvalidRequestError(f"no offset of {topic}, partition {partition}, was given; nothing was sent")
            if not NO_EPOCH <= item.leader_epoch <= _INT_MAX:
                raise InvalidRequestError(
                    f"{item.leader_epoch} is not a leader epoch of {topic}, partition {partition}; nothing was sent"
                )
            if is_too_large(item.metadata):
                raise InvalidRequestError(
                    f"the metadata of the offset of {topic}, partition {partition}, is longer than the "
                    f"{METADATA_CHARACTERS_MAX} characters (UTF-16 code units) that brokers take; nothing was sent",
                    code="offset-metadata-too-large",
                )
            if not _is_text(item.metadata):
                raise InvalidRequestError(
                    f"offset metadata of {topic}, partition {partition}, contains a lone surrogate and cannot be "
                    "encoded; nothing was sent"
                )
        # One form for what means the same: savepoints say what has changed.
        said = {where: item for where, item in self.details.items() if item != NO_DETAILS}
        object.__setattr__(self, "details", said)

    @property
    def member(self) -> GroupMember:
        """Return the committer."""
        return GroupMember(self.group_id, self.generation, self.member_id, self.instance_id)

    def joined(self, later: GroupOffsets) -> GroupOffsets:
        """Return these, with those that the same group gave later."""
        kept = {where: item for where, item in self.details.items() if where not in later.offsets}
        return replace(later, offsets={**self.offsets, **later.offsets}, details={**kept, **later.details})


_METADATA: Final = b"CGMDv2:"


def parse_group_metadata(metadata: object) -> GroupMember:
    """Return the committer that confluent-kafka's ``consumer_group_metadata()`` describes.

    A group's name alone is accepted too, for a client outside of the group.

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
