"""Whose rows are written: the name, the session and the number by which all tasks of a job mean the same transaction.

A task of a streaming query finds the query's id and the number of the micro-batch in its local properties, and there
the id of the query's run, too, as the group of its jobs. A restarted driver has another run, and so another session.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rollbridge.errors import InvalidRequestError
from rollbridge.model.names import check_client_name

QUERY_ID: Final = "sql.streaming.queryId"
BATCH_ID: Final = "streaming.sql.batchId"
RUN_ID: Final = "spark.jobGroup.id"

LocalProperty = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Work:
    """What the tasks of one job write together.

    Attributes:
        client_name: Whose transaction it is.
        session: What all processes that work for one run of the client call it.
        series: What the number counts in.
        number: Of the transaction in the series.
        once: Whether nobody will ever come back to this client name.
        unique: Whether nobody will ever come back to this series.
    """

    client_name: str
    session: str
    series: str
    number: int
    once: bool = False
    unique: bool = False

    def __str__(self) -> str:
        return f"{self.series}/{self.number}"


def work_of_query(property_of: LocalProperty, client_name: str | None, stand_in: str) -> Work:
    """What a task of a streaming query writes.

    Args:
        property_of: The local properties of the task.
        client_name: If the user named one; made of the query's id otherwise.
        stand_in: The session where Spark does not say which run it is.

    Raises:
        InvalidRequestError: it is not a task of a streaming query.
    """
    query, batch = property_of(QUERY_ID), property_of(BATCH_ID)
    if not query or not batch:
        raise InvalidRequestError(
            f"Spark does not say for which query and micro-batch this task works ({QUERY_ID}: {query}, {BATCH_ID}: "
            f"{batch}); nothing was written"
        )
    return Work(client_name or f"spark-{query}", property_of(RUN_ID) or stand_in, query, int(batch))


def work_of_job(client_name: str | None, label: str, number: int = 0) -> Work:
    """What the tasks of a batch job write: something of its own, or what the label names, whichever job does it."""
    job = str(uuid.uuid4())
    name = client_name or f"spark-{job}"
    check_client_name(name)
    return Work(name, job, label or job, number, once=client_name is None, unique=not label)
