"""Admin requests whose leader dies between their effect and its answer: the next leader says what is true."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import rollbridge
from bridge.tests.refusals import raises_code
from integration_tests.backends.interface import AnyCluster
from integration_tests.coordinators import Relay
from integration_tests.patience import PATIENCE_S
from rollbridge.errors import TransactionAbortedError


def test_an_abort_and_a_truncation_that_a_killed_leader_has_carried_out_are_not_denied(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    scope = unique_name("answers")
    stream, root = f"{scope}/orders", f"/{scope}"
    options = rollbridge.ClientOptions(admin_timeout_s=PATIENCE_S)
    points = ["answer_waiting/Write:before", "truncate_stream/DeleteRecords:after"]
    with (
        Relay(cluster, root, tmp_path, points) as relay,
        rollbridge.connect(
            cluster.bootstrap_servers, zookeeper=cluster.zookeeper, zookeeper_root=root, options=options
        ) as b,
    ):
        b.admin.create_stream(stream)
        with b.transaction(stream) as kept:
            futures = [kept.write(stream, key=b"k", value=b"%d" % number) for number in range(3)]
        group = b.admin.describe(stream).config.group
        doomed = b.begin(stream)
        doomed.write(stream, key=b"k", value=b"no")
        doomed.flush()
        assert b.admin.abort_transaction(doomed.id, reason="in the way", group=group) == "in the way"
        assert relay.deaths == 1, "the leader died when it was to answer"
        with pytest.raises(TransactionAbortedError, match="in the way"):
            doomed.commit()
        with raises_code("already-committed"):
            b.admin.abort_transaction(kept.id, group=group)
        assert b.admin.abort_transaction(doomed.id, reason="another one", group=group) == "in the way"
        place = futures[2].result()
        b.admin.truncate(stream, place)
        assert relay.deaths == 2
        with b.reader(stream, follow=False) as reader:
            assert [record.value for record in reader] == [b"2"]
