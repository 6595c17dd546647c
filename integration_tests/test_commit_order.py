"""The order of one session's commits: that in which they were asked for, whatever buffers their frames go to."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

import rollbridge
from integration_tests.clients import Site
from rollbridge.client.transaction import CommitFuture

COMMITS = 4_000
PATIENCE_S = 120


def inverted(futures: list[CommitFuture]) -> int:
    """How many neighbours stand in the commit log the other way round than they were asked for."""
    positions = [future.result(PATIENCE_S).position for future in futures]
    return sum(earlier > later for earlier, later in pairwise(positions))


def ask_for_many(client: rollbridge.Bridge, *choices: tuple[str, ...], commits: int = COMMITS) -> list[CommitFuture]:
    """Commit small transactions one behind the other, the streams in turn, without waiting for any answer."""
    futures = []
    for number in range(commits):
        streams = choices[number % len(choices)]
        transaction = client.begin(*streams)
        for stream in streams:
            transaction.write(stream, key=b"k%d" % (number % 7), value=b"%d" % number)
        futures.append(transaction.commit_async())
    return futures


@pytest.mark.parametrize("name", ["one-session", None], ids=["named", "without a name of its own"])
def test_commits_of_one_session_keep_their_order_across_buffer_partitions(
    site: Site, unique_name: Callable[[str], str], name: str | None
) -> None:
    stream = f"{unique_name('order')}/events"
    with site.connect(name) as client:
        client.admin.create_stream(stream, segments=2, buffer_partitions=4)
        assert inverted(ask_for_many(client, (stream,))) == 0


def test_commits_of_one_session_keep_their_order_across_the_streams_of_a_group(
    site: Site, client: rollbridge.Bridge, orders: str, payments: str
) -> None:
    assert inverted(ask_for_many(client, (orders,), (payments,))) == 0


def test_a_commit_over_several_streams_is_not_overtaken_by_a_later_one_of_its_session(
    site: Site, client: rollbridge.Bridge, orders: str, payments: str
) -> None:
    # The COMMIT frame of several streams waits for acknowledgements of the others; that of one goes at once.
    assert inverted(ask_for_many(client, (orders, payments), (payments,), (payments, orders), commits=1_000)) == 0
