"""Offsets of the sources as they stand in a query's checkpoint: JSON that can be read, and says whose it is. Pure.

===============  ======================================================================
field            meaning
===============  ======================================================================
``cluster``      Kafka's id of the cluster
``streamId``     Kafka's id of the stream's buffer topic: another stream of the same name has another one
``position``     ``sales/orders@EPOCH-NUMBER:OFFSET,...``, which ``b.reader(start=...)`` takes as well
``commitLog``    where the commit log is read from for ``commitPosition``; only if that column is asked for
===============  ======================================================================

Those of ``rollbridge-transactions`` have ``cluster``, ``logId`` and a position in the commit log, ``sales/default@17``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from rollbridge.errors import InvalidRequestError
from rollbridge.model.position import LogPosition, ReadPosition

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """How far a query has read a stream.

    Attributes:
        cluster: Kafka's id of the cluster.
        stream_id: Tells the stream from others of the same name.
        position: The stream, and the offsets.
        commit_log: Every transaction that has records behind the position stands there or later in the commit log;
            None if that is not known.
    """

    cluster: str
    stream_id: str
    position: ReadPosition
    commit_log: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain JSON; equal offsets give equal texts."""
        found: dict[str, Any] = {"cluster": self.cluster, "streamId": self.stream_id, "position": str(self.position)}
        return found if self.commit_log is None else {**found, "commitLog": self.commit_log}

    @classmethod
    def of_json(cls, found: Json) -> Self:
        """The inverse of :meth:`as_json`; InvalidRequestError if it is something else."""
        try:
            commit_log = found.get("commitLog")
            return cls(
                str(found["cluster"]),
                str(found["streamId"]),
                ReadPosition.parse(str(found["position"])),
                None if commit_log is None else int(commit_log),
            )
        except (KeyError, ValueError, AttributeError) as exc:
            raise _foreign(found, "rollbridge") from exc

    def check_same(self, here: StreamOffset) -> None:
        """Raise InvalidRequestError unless both are of the same stream of the same cluster."""
        if self.position.stream != here.position.stream:
            raise InvalidRequestError(
                f"the checkpoint belongs to stream {self.position.stream}, not to {here.position.stream}; nothing was "
                "read: give the query the stream that it was started with, or another checkpointLocation"
            )
        _check_cluster(self.cluster, here.cluster)
        if self.stream_id != here.stream_id:
            raise InvalidRequestError(
                f"stream {self.position.stream} was deleted and created again since the checkpoint was written, so its "
                "offsets mean nothing any more; nothing was read: begin anew with another checkpointLocation"
            )


@dataclass(frozen=True, slots=True)
class LogOffset:
    """How far a query has read a commit log; ``log_id`` is Kafka's id of its topic."""

    cluster: str
    log_id: str
    position: LogPosition

    def as_json(self) -> dict[str, Any]:
        """Plain JSON; equal offsets give equal texts."""
        return {"cluster": self.cluster, "logId": self.log_id, "position": str(self.position)}

    @classmethod
    def of_json(cls, found: Json) -> Self:
        """The inverse of :meth:`as_json`; InvalidRequestError if it is something else."""
        try:
            return cls(str(found["cluster"]), str(found["logId"]), LogPosition.parse(str(found["position"])))
        except (KeyError, AttributeError) as exc:
            raise _foreign(found, "rollbridge-transactions") from exc

    def check_same(self, here: LogOffset) -> None:
        """Raise InvalidRequestError unless both are of the same commit log."""
        if self.position.group != here.position.group:
            raise InvalidRequestError(
                f"the checkpoint belongs to the commit log of {self.position.group}, not to that of "
                f"{here.position.group}; nothing was read: use another checkpointLocation"
            )
        _check_cluster(self.cluster, here.cluster)
        if self.log_id != here.log_id:
            raise InvalidRequestError(
                f"the commit log of {self.position.group} is another one than when the checkpoint was written; nothing "
                "was read: begin anew with another checkpointLocation"
            )


def _check_cluster(known: str, here: str) -> None:
    if known != here:
        raise InvalidRequestError(
            f"the checkpoint belongs to Kafka cluster {known}, but the brokers are those of cluster {here}; nothing "
            "was read: check the address, or use another checkpointLocation"
        )


def _foreign(found: Json, name: str) -> InvalidRequestError:
    return InvalidRequestError(
        f'{found!r} is no offset of format("{name}"): the checkpoint belongs to another source; nothing was read: use '
        "another checkpointLocation"
    )
