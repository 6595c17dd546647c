"""What is derived from the arguments of a begin, and checked: the streams, their group and routes, lease and label."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Final

from rollbridge.client.options import ClientOptions
from rollbridge.client.outcomes import OutcomeTail
from rollbridge.client.runtime import Plan
from rollbridge.client.sessions import ClientSessions
from rollbridge.errors import GroupMismatchError, InvalidRequestError, InvalidTimeoutError, UnavailableError
from rollbridge.model.frames import LABEL_CHARACTERS_MAX, STREAMS_MAX, BeginFrame
from rollbridge.model.names import GroupName
from rollbridge.model.terminated import RETAIN_DEFAULT
from rollbridge.zookeeper.catalog import Catalog

_PLANS_MAX: Final = 1_000
_Wanted = tuple[tuple[str, ...], timedelta | None, str | None, timedelta | None]
"""What a transaction is begun with."""


class Planner:
    """Makes the plans of one connection's transactions, and keeps them until a stream changes."""

    def __init__(
        self,
        client_name: str,
        options: ClientOptions,
        catalog: Catalog,
        outcomes: OutcomeTail,
        sessions: ClientSessions,
        lease_limit: Callable[[GroupName], tuple[str, timedelta] | None],
    ) -> None:
        """``lease_limit`` looks up which coordinator leads a group and the longest lease that it grants, if known."""
        self._client_name = client_name
        self._options = options
        self._catalog = catalog
        self._outcomes = outcomes
        self._sessions = sessions
        self._lease_limit = lease_limit
        self._lease_limits: dict[GroupName, timedelta] = {}
        self._plans: dict[_Wanted, Plan] = {}

    def plan(
        self, streams: tuple[str, ...], timeout: timedelta | None, label: str | None, retain: timedelta | None
    ) -> Plan:
        """The plan of a transaction; raises as :meth:`rollbridge.Bridge.begin` does."""
        wanted = (streams, timeout, label, retain)
        plan = self._plans.get(wanted)
        if plan is None or plan.generation != self._catalog.generation:
            plan = self._make(*wanted)
            if len(self._plans) >= _PLANS_MAX:
                self._plans.clear()
            self._plans[wanted] = plan
        return plan

    def _make(
        self, streams: tuple[str, ...], timeout: timedelta | None, label: str | None, retain: timedelta | None
    ) -> Plan:
        if not streams:
            raise InvalidRequestError("a transaction needs at least one stream; nothing was written")
        if len(streams) > STREAMS_MAX:
            raise InvalidRequestError(
                f"a transaction spans at most {STREAMS_MAX} streams, not {len(streams)}; nothing was written"
            )
        if len(set(streams)) < len(streams):
            raise InvalidRequestError(f"a stream is named twice: {', '.join(streams)}; nothing was written")
        if label is not None and len(label) > LABEL_CHARACTERS_MAX:
            raise InvalidRequestError(
                f"a label has at most {LABEL_CHARACTERS_MAX} characters, not {len(label)}; nothing was written"
            )
        lease = self._options.lease if timeout is None else timeout
        if not timedelta(milliseconds=1) <= lease <= self._options.lease_max:
            raise InvalidTimeoutError(
                f"a transaction may stay open for up to {self._options.lease_max}, not for {lease}; nothing was written"
            )
        if retain is not None and retain < timedelta(0):
            raise InvalidTimeoutError(f"an outcome can not be remembered for {retain}; nothing was written")
        generation = self._catalog.generation
        views = [self._catalog.view(stream) for stream in streams]
        group = views[0].config.group
        for view in views:
            if view.config.group != group:
                raise GroupMismatchError(
                    f"{streams[0]} belongs to group {group} and {view.config.name} to group {view.config.group}; "
                    "a transaction spans streams of one group only; nothing was written"
                )
        self._check_lease(group, lease)
        self._outcomes.follow(group, self._options.connect_timeout_s)
        routes = tuple(view.route for view in views)
        begin = BeginFrame(
            self._client_name,
            self._sessions.epoch(group, self._options.admin_timeout_s),
            label,
            lease // timedelta(milliseconds=1),
            {route.stream: route.epoch for route in routes},
            RETAIN_DEFAULT if retain is None else retain // timedelta(milliseconds=1),
        )
        return Plan(group, begin, routes, generation)

    def _check_lease(self, group: GroupName, lease: timedelta) -> None:
        """Refuse a lease over the limit of the group's leader, if that can be told; the leader refuses it anyhow.

        What was learnt before is enough to let a lease pass; it is looked up again before one is refused.
        """
        if lease <= self._lease_limits.get(group, timedelta(0)):
            return
        try:
            found = self._lease_limit(group)
        except UnavailableError:
            return
        if found is None:
            return
        leader, limit = found
        self._lease_limits[group] = limit
        if lease > limit:
            raise InvalidTimeoutError(
                f"coordinator {leader} lets a transaction of group {group} stay open for up to {limit} (its setting "
                f"lease_ms_max), not for {lease}; nothing was written"
            )
