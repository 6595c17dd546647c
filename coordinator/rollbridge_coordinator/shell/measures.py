"""What retention goes by: how much disk segments take, and what consumer groups have committed.

Nothing of it is worth giving up the lead for: what can not be told now is left out, and nothing is deleted meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from rollbridge.errors import RollbridgeError
from rollbridge.kafka.group_commits import GroupCommits
from rollbridge.kafka.leaders import ask_once
from rollbridge.kafka.log_dirs import leader_bytes
from rollbridge.kafka.log_offsets import LATEST, offsets_question
from rollbridge.kafka.metadata import Cluster, Isolation
from rollbridge.kafka.patience import Backoff, Deadline
from rollbridge.kafka.quiet import limited
from rollbridge_coordinator.config import CoordinatorSettings

logger = limited(logging.getLogger(__name__))

ANSWER_S: Final = 5.0
"""How long a broker that is there may take to tell; the group's transactions wait meanwhile."""
CONNECT_S: Final = 2.0
"""How long it may take to connect to one."""
ELECTION_S: Final = 0.2
"""How long it is asked again for a partition that nobody leads: that is over soon, or takes long."""


class Measures:
    """Asks brokers; used by one thread."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._cluster = Cluster(
            settings.bootstrap_servers,
            security=settings.security,
            connect_timeout_s=CONNECT_S,
            request_timeout_s=ANSWER_S,
        )
        self._groups: dict[str, GroupCommits] = {}

    def close(self) -> None:
        """Drop the connections."""
        self._cluster.disconnect()

    def stable_ends(self, topics: Sequence[str]) -> dict[str, int]:
        """See :class:`rollbridge_coordinator.state.effects.StableEnds`."""
        question = offsets_question(LATEST, Isolation.READ_COMMITTED)
        found: dict[str, int] = {}
        left = [(topic, 0) for topic in topics]
        if not left:
            return found
        deadline = Deadline(ELECTION_S)
        backoff = Backoff()
        why: object = ""
        try:
            while left:
                answers = ask_once(self._cluster, left, question)
                found |= {topic: end for (topic, _), end in answers.found.items()}
                left = [place for place in left if place not in answers.found]
                if not left:
                    return found
                place = left[0]
                why = answers.lost.get(place) or answers.refused[place][0].name
                if deadline.passed():
                    break
                backoff.sleep(deadline)
        except RollbridgeError as fault:
            why = fault
        logger.warning("the ends of %d segments, %s among them, can not be told now: %s", len(left), left[0][0], why)
        return found

    def disk_bytes(self, topics: Sequence[str]) -> dict[str, int]:
        """See :class:`rollbridge_coordinator.state.effects.DiskBytes`."""
        try:
            return leader_bytes(self._cluster, topics)
        except RollbridgeError as fault:
            logger.warning("the sizes of segments can not be told now, so none is truncated by size: %s", fault)
            return {}

    def group_commits(self, groups: Sequence[str]) -> dict[str, dict[str, int]]:
        """See :class:`rollbridge_coordinator.state.effects.GroupCommits`."""
        found: dict[str, dict[str, int]] = {}
        for name in groups:
            try:
                found[name] = {item.topic: item.offset for item in self._commits_of(name).read(timeout_s=ANSWER_S)}
            except RollbridgeError as fault:
                logger.warning("what group %s has read can not be told now, so it is waited for: %s", name, fault)
        return found

    def _commits_of(self, name: str) -> GroupCommits:
        known = self._groups.get(name)
        if known is None:
            settings = self._settings
            known = self._groups[name] = GroupCommits(
                settings.bootstrap_servers, name, security=settings.security, client_id=settings.name
            )
        return known
