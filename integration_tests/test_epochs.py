"""Expiry of epochs on real servers: what was given out stays valid, and everybody goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Literal

import pytest

from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site, consumer_of, patient_client, read_and_commit
from integration_tests.command_line import Cli
from integration_tests.coordinators import Relay, until
from rollbridge.base.ids import SegmentId
from rollbridge.base.sn import ANY, EMPTY
from rollbridge.errors import CasWriteError, InvalidRequestError, TransactionRefusedError, TruncatedError
from rollbridge.stream.names import StreamName
from rollbridge.stream.positions import ReadPosition

SETTINGS = {
    "CONSTANT_TRUNCATE_BUFFERS_MS": "100",
    "CONSTANT_RETENTION_CHECK_MS": "100",
    "CONSTANT_BOOKKEEPING_MS": "100",
    "CONSTANT_EPOCHS_KEEP_MS": "1",
}
SCALES = 4
KEY = b"k"


def test_a_stream_goes_on_when_its_first_epochs_are_dropped_and_its_leader_dies_at_that(
    cluster: AnyCluster,
    scope: str,
    unique_name: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    root, stream, group = f"/{unique_name('epochs')}", f"{scope}/orders", unique_name("group")

    def consumed(last: bytes) -> list[bytes | None]:
        """What the group reads and commits up to a value."""
        with consumer_of(cluster, root, group, stream) as consumer:
            return read_and_commit(consumer, last)

    with (
        Relay(cluster, root, tmp_path, ["drop_epochs/Write:after"]) as relay,
        patient_client(cluster, root) as b,
    ):
        b.admin.create_stream(stream)
        writer = b.cas_writer(stream)
        sns = [writer.write(key=KEY, value=b"0", expected=EMPTY)]
        old = b.begin(stream)
        old.write(stream, key=KEY, value=b"rolled")
        old.flush()
        with b.reader(stream, follow=False) as reader:
            assert [record.value for record in reader] == [b"0"]
            position = reader.position
        assert consumed(b"0") == [b"0"]
        follower = b.reader(stream)
        for number in range(SCALES):
            b.admin.scale(stream, seal=[number], ranges=[(0.0, 1.0)])
            sns.append(writer.write(key=KEY, value=b"%d" % (number + 1), expected=sns[-1]))
        old.commit()
        b.admin.scale(stream, seal=[SCALES], ranges=[(0.0, 1.0)])
        sns.append(writer.write(key=KEY, value=b"5", expected=writer.tail(key=KEY)))
        everything = [*(b"%d" % number for number in range(SCALES + 1)), b"rolled", b"5"]
        assert [record.value for record in islice(follower, len(everything))] == everything

        # Nothing is left of epochs 0 to 6: only the last of these is kept, since epoch 7 continues it.
        [active] = b.admin.history(stream).active.segments
        b.admin.truncate(stream, str(ReadPosition(StreamName.parse(stream), {active.id: 0})))
        until(lambda: b.admin.history(stream).first > 0)
        until(lambda: relay.deaths == 1)
        history = b.admin.history(stream)
        assert (history.first, history.active.epoch) == (SCALES + 2, SCALES + 3)
        assert history.removed == {SegmentId.of(SCALES, SCALES + 2)}
        description = b.admin.describe(stream)
        assert (description.epochs, description.first_epoch) == (SCALES + 4, SCALES + 2)

        # The next leader scales and commits; readers go on where they were, or hear what they have missed.
        with b.transaction(stream) as txn:
            txn.expect(stream, key=KEY, sn=sns[-1])
            txn.write(stream, key=KEY, value=b"6")
        b.admin.scale(stream, seal=[SCALES + 1], ranges=[(0.0, 1.0)])
        fresh = b.cas_writer(stream)
        last = writer.tail(key=KEY)
        for one in (writer, fresh):
            for stale in (sns[0], sns[-2], sns[-1]):
                for scope_of in ("segment", "key"):
                    with pytest.raises(CasWriteError) as caught:
                        one.write(key=KEY, value=b"no", expected=stale, scope=scope_of)
                    assert caught.value.actual == last, (stale, scope_of)
            with pytest.raises(CasWriteError) as caught:
                one.write(key=b"other", value=b"no", expected=EMPTY, scope="key")
            assert caught.value.actual == ANY, "nobody can tell whether there was one"
        sns.append(fresh.write(key=KEY, value=b"7", expected=last))
        assert [record.value for record in islice(follower, 2)] == [b"6", b"7"]
        with b.reader(stream, follow=False) as reader:
            records = list(reader)
        assert [record.value for record in records] == [b"5", b"6", b"7"]
        assert [record.sn for record in (records[0], records[2])] == sns[-2:]
        ids = [record.sn.sequence_id for record in records if record.sn is not None]
        assert ids == sorted(filter(None, ids))
        assert len(ids) == 3
        assert consumed(b"7") == [b"5", b"6", b"7"]
        with pytest.raises(TruncatedError, match="its epoch dropped"):
            b.reader(stream, start=position)
        with pytest.raises(InvalidRequestError, match="no segment"):
            b.reader(stream, start=f"{stream}@0-99:0")
        follower.close()

        cli = Cli(cluster, root)
        assert "epochs 0 to 5 were dropped" in cli("stream", "history", stream).out
        assert "9 epochs so far, epochs 0 to 5 were dropped" in cli("stream", "describe", stream).out
        findings = json.loads(cli("doctor", "--json").out)["findings"]
        assert not [item for item in findings if scope in item["what"] and item["check"] != "no-standby"]


@pytest.mark.parametrize("scope_of", ["segment", "key"])
def test_where_epochs_with_records_are_dropped_nobody_says_that_nothing_was_written(
    cluster: AnyCluster,
    scope: str,
    unique_name: Callable[[str], str],
    tmp_path: Path,
    scope_of: Literal["segment", "key"],
) -> None:
    """Of what is left nothing was ever written to, so only what was dropped can tell."""
    root, stream = f"/{unique_name('epochs')}", f"{scope}/orders"
    with Site(cluster, root, tmp_path, **SETTINGS) as site, site.connect() as b:
        b.admin.create_stream(stream)
        with b.cas_writer(stream) as idle:
            idle.write(key=KEY, value=b"0", expected=EMPTY)
        for number in range(3):
            b.admin.scale(stream, seal=[number], ranges=[(0.0, 1.0)])
        [active] = b.admin.history(stream).active.segments
        b.admin.truncate(stream, str(ReadPosition(StreamName.parse(stream), {active.id: 0})))
        until(lambda: b.admin.history(stream).first > 0)
        with b.cas_writer(stream) as fresh:
            assert fresh.tail(KEY, scope=scope_of) == ANY
            with pytest.raises(CasWriteError):
                fresh.write(key=KEY, value=b"no", expected=EMPTY, scope=scope_of)
        transaction = b.begin(stream)
        transaction.expect(stream, key=KEY, sn=EMPTY, scope=scope_of)
        transaction.write(stream, key=KEY, value=b"no")
        with pytest.raises(TransactionRefusedError):
            transaction.commit()
        with b.reader(stream, follow=False) as reader:
            assert list(reader) == []
