"""Each transaction can be followed through its leader's log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site
from integration_tests.command_line import Cli
from integration_tests.coordinators import until
from rollbridge.base.ids import TransactionId
from rollbridge.errors import TransactionAbortedError, TransactionNotFoundError
from rollbridge.stream.names import StreamName


def test_the_last_events_of_a_transaction_are_told_and_stand_in_errors_about_it(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    scope = unique_name("story")
    stream = str(StreamName(scope, "orders"))
    with Site(cluster, f"/{scope}", tmp_path) as site, site.connect("teller") as b:
        b.admin.create_stream(stream)
        with b.transaction(stream) as committed:
            committed.write(stream, key=b"k", value=b"v")
        aborted, open_one = b.begin(stream), b.begin(stream)
        for transaction in (aborted, open_one):
            transaction.write(stream, key=b"k", value=b"v")
            transaction.flush()
        until(lambda: {aborted.id, open_one.id} <= {record.id for record in b.admin.transactions()})
        b.admin.abort_transaction(aborted.id, reason="it was in the way")
        with pytest.raises(TransactionAbortedError, match=r"its leader saw: .*in the way") as caught:
            aborted.commit()
        heard = [line.partition("Z ")[2].partition(" (")[0] for line in caught.value.events]
        assert heard[:3] == [  # that of the commit that comes too late may follow
            "unknown -> open",
            "open -> aborting",
            "aborting -> aborted",
        ]
        story = b.story(open_one.id)
        assert (story.state, story.records, story.controller_epoch) == ("open", 1, 1)
        assert [event.event for event in story.events] == ["begin"]
        assert [event.after for event in b.story(committed.id).events] == ["open", "committing", "committed"]
        with pytest.raises(TransactionNotFoundError):
            b.story(TransactionId.of(0, 12345))

        run = Cli(cluster, site.root)
        told = run.json("txn", "describe", str(open_one.id))
        assert (told["state"], [event["after"] for event in told["events"]]) == ("open", ["open"])
        text = run("txn", "describe", str(aborted.id)).out
        assert "open -> aborting (abort: it was in the way)" in text

        # Events begin anew with each leader, which says so.
        site.stop_coordinator()
        without = run.json("txn", "describe", str(open_one.id))
        assert "no coordinator" in without["events_unknown"]
        assert without["state"] == "open"
        site.start_coordinator()
        anew = "Nothing has happened to it since the leader of controller epoch 2 took over"
        until(lambda: anew in run("txn", "describe", str(open_one.id)).out)
        open_one.commit()
        told = run.json("txn", "describe", str(open_one.id))
        assert [event["after"] for event in told["events"]] == ["committing", "committed"]
