"""Members of consumer groups that were introduced to transactions: what they may have committed there.

A transaction commits whatever offsets it is given, but knows nothing of what a group has read. The consumer does, if it
is in the same process; so it is asked, by the group and the member that its ``consumer_group_metadata()`` names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol
from weakref import WeakValueDictionary

from rollbridge.errors import InvalidRequestError
from rollbridge.model.group_offsets import GroupMember, parse_group_metadata


class Judge(Protocol):
    """What a member knows of its group."""

    def is_over(self, topic: str) -> bool:
        """Whether the group has read a segment to its end."""

    def check_commit(self, topic: str, offset: int) -> None:
        """Raise InvalidRequestError for what nobody can have read."""


_introduced: Final[WeakValueDictionary[tuple[str, str], Judge]] = WeakValueDictionary()


def introduce(metadata: object, judge: Judge) -> None:
    """Have ``judge`` asked about what is committed with these metadata, as long as it lives."""
    try:
        member = parse_group_metadata(metadata)
    except InvalidRequestError:
        return  # whoever is given them says so
    if member.member_id:
        _introduced[member.group_id, member.member_id] = judge


def check_offsets(member: GroupMember, segments: Iterable[tuple[str, int]]) -> None:
    """Refuse to have offsets of segments, by topic, committed that count as read what nobody can have read.

    Raises:
        InvalidRequestError: a segment waits for what it continues, or less than that was handed out of it.
    """
    judge = _introduced.get((member.group_id, member.member_id))
    if judge is not None:
        for topic, offset in segments:
            if not judge.is_over(topic):
                judge.check_commit(topic, offset)
