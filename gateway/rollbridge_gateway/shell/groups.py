"""Consumer groups as a broker looks at them before it takes a transaction's offsets: who is in which generation.

No request asks for exactly that and changes nothing, but a member's heartbeat is judged alike in a classic group, and
does no more than say that the member lives. Members of the newer protocol (KIP-848) have no such heartbeat; they are
listed with their epochs. All of it is asked on the client's own connection, which is one to the group's coordinator: on
any other one the broker says so, and the client looks for it, as it would at a broker.

Source: Kafka's ``OffsetMetadataManager.validateTransactionalOffsetCommit``, ``ClassicGroup.validateOffsetCommit`` and
``ConsumerGroup.validateOffsetCommit``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from rollbridge_gateway.procedures import GroupCommit
from rollbridge_gateway.shell.relay import Upstream
from rollbridge_gateway.versions import VersionRange

_HEARTBEAT: Final = 12
_DESCRIBE_GROUPS: Final = 15
_CONSUMER_GROUP_DESCRIBE: Final = 69
_IN_REBALANCE: Final = ErrorCode.rebalance_in_progress
"""The group is about to begin another generation; until then the member's is the present one."""
_DEAD: Final = "Dead"
"""State of a group that does not exist."""


async def refusal(upstream: Upstream, versions: Mapping[int, VersionRange], commit: GroupCommit) -> ErrorCode:
    """Return the code with which a group's coordinator would refuse offsets for who commits them; none if it would not.

    Args:
        upstream: The client's connection to the group's coordinator.
        versions: What the broker serves.
        commit: The offsets.

    Raises:
        BrokerGoneError: the broker does not answer.
    """
    if commit.group and commit.generation < 0 and not commit.member and commit.instance is None:
        return ErrorCode.none  # somebody outside of it
    values = {
        "group_id": commit.group,
        "generation_id": commit.generation,
        "member_id": commit.member,
        "group_instance_id": commit.instance,
    }
    code: ErrorCode = (await upstream.ask(_HEARTBEAT, 4, None, values)).error_code
    if code in (ErrorCode.none, _IN_REBALANCE):
        return ErrorCode.none
    if code is not ErrorCode.unknown_member_id:
        return code
    if _CONSUMER_GROUP_DESCRIBE in versions:
        group = await _described(upstream, _CONSUMER_GROUP_DESCRIBE, 0, {"group_ids": [commit.group]})
        if group.error_code is ErrorCode.none:
            return _of_members({str(item.member_id): int(item.member_epoch) for item in group.members}, commit)
        if group.error_code is ErrorCode.topic_authorization_failed:
            return (
                ErrorCode.none
            )  # members read topics that the client may not see; the leader asks again at the commit
        if group.error_code is not ErrorCode.group_id_not_found:
            return ErrorCode(group.error_code)
    return await _of_classic_group(upstream, commit)


def _of_members(epochs: Mapping[str, int], commit: GroupCommit) -> ErrorCode:
    if commit.generation < 0 and not epochs:
        return ErrorCode.none
    epoch = epochs.get(commit.member)
    if epoch is None:
        return ErrorCode.unknown_member_id
    return ErrorCode.none if epoch == commit.generation else ErrorCode.illegal_generation


async def _of_classic_group(upstream: Upstream, commit: GroupCommit) -> ErrorCode:
    """Return the code of a member that a classic group does not know; there may be no such group."""
    group = await _described(upstream, _DESCRIBE_GROUPS, 5, {"groups": [commit.group]})
    if group.error_code is not ErrorCode.none:
        return ErrorCode(group.error_code)
    if group.group_state == _DEAD:
        return ErrorCode.none if commit.generation < 0 else ErrorCode.illegal_generation
    is_empty = not group.members
    return ErrorCode.none if commit.generation < 0 and is_empty else ErrorCode.unknown_member_id


async def _described(upstream: Upstream, key: int, version: int, values: Mapping[str, Any]) -> Any:
    [group] = (await upstream.ask(key, version, None, values)).groups
    return group
