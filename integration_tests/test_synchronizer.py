"""States that processes share, on real topics: what they promise, when things fail, and every bad input."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import rollbridge
from integration_tests.clients import Site, until
from integration_tests.faults import Api, FaultProxy, Point
from integration_tests.synchronizer_worker import Entries, share, work
from rollbridge import ANY, EMPTY, SN, Codec, Synchronizer
from rollbridge.cas.shared_state import MARK_HEADER
from rollbridge.errors import (
    ConflictError,
    InvalidRequestError,
    RecordTooLargeError,
    StreamNotFoundError,
)
from rollbridge.kafka.client import KafkaClient
from rollbridge.stream.keyspace import KeySpace
from rollbridge.stream.names import StreamName
from spark_examples.demo.common import finish, kill, start

KEY = b"state"


def concatenate(state: bytes, update: bytes) -> bytes:
    return state + update


def opened(client: rollbridge.Bridge, stream: str, key: bytes = KEY) -> Synchronizer[bytes, bytes]:
    """Its state is the updates, one after the other."""
    return client.synchronizer(stream, key, b"", concatenate)


def add(update: bytes) -> Callable[[bytes], list[bytes]]:
    return lambda state: [update]


def values(site: Site, stream: str) -> list[bytes | None]:
    return [message.value() for message in site.committed(stream)]


def first_offsets(site: Site, client: rollbridge.Bridge, stream: str) -> list[int]:
    """Where each segment begins, the oldest segment first; the end of one that was removed."""
    name, history = StreamName.parse(stream), client.admin.history(stream)
    topics = {segment: name.segment_topic(segment) for segment in history.stored()}
    found = KafkaClient(site.cluster.bootstrap_servers).offsets.first(topics.values())
    return [
        found[topics[segment]] if segment in topics else history.sealed_end(segment) or 0
        for segment in history.segments()
    ]


def test_all_see_the_same_state_and_each_update_is_made_for_the_newest(client: rollbridge.Bridge, orders: str) -> None:
    seen: list[bytes] = []

    def next_letter(state: bytes) -> list[bytes]:
        seen.append(state)
        return [bytes([b"a"[0] + len(state)])]

    with opened(client, orders) as one, opened(client, orders) as other:
        assert (one.state, one.sn) == (b"", EMPTY)
        one.update(next_letter)
        other.update(next_letter)
        sn = one.update(next_letter)
        assert seen == [b"", b"", b"a", b"a", b"ab"]
        assert (one.state, one.sn) == (b"abc", sn)
        assert other.state == b"ab"
        assert other.fetch() == b"abc"
        assert other.sn == sn


def test_updates_of_one_call_are_one_and_none_is_an_answer_about_the_newest_state(
    client: rollbridge.Bridge, ledger: str
) -> None:
    with opened(client, ledger) as one, opened(client, ledger) as other:
        assert one.update(lambda state: None) is None
        assert one.sn == EMPTY  # nothing was written for an update that is none
        one.update(lambda state: [b"a", b"b"])
        assert other.update(lambda state: None if state == b"ab" else [b"no"]) is None
        assert other.update(lambda state: []) is None
        assert other.state == b"ab"


def test_what_starts_reads_the_last_snapshot_and_what_follows(client: rollbridge.Bridge, orders: str) -> None:
    applied: list[bytes] = []

    def counted(state: bytes, update: bytes) -> bytes:
        applied.append(update)
        return state + update

    with opened(client, orders) as one, client.cas_writer(orders) as others:
        for number in range(10):
            one.update(add(b"%d" % number))
            others.write(b"other-%d" % number, b"", expected=ANY)
        assert one.bytes_since_snapshot == 10
        assert one.compact() == one.sn
        assert one.bytes_since_snapshot == 0
        assert one.compact(lambda state: None) is None
        one.update(add(b"!"))
    with client.synchronizer(orders, KEY, b"", counted) as late:
        assert (late.state, late.bytes_since_snapshot) == (b"0123456789!", 1)
    assert applied == [b"!"]


def test_a_compactor_may_say_the_same_in_less(client: rollbridge.Bridge, ledger: str) -> None:
    def total(state: bytes, update: bytes) -> bytes:
        return b"%d" % (sum(int(part) for part in state.split()) + int(update))

    with client.synchronizer(ledger, KEY, b"1 2", total) as one:
        assert one.compact(lambda state: total(state, b"0")) == one.sn
        assert one.state == b"3"
        one.update(add(b"4"))
    with client.synchronizer(ledger, KEY, b"never used", total) as late:
        assert late.state == b"7"


def test_several_states_and_other_records_share_a_segment(site: Site, client: rollbridge.Bridge, ledger: str) -> None:
    with (
        opened(client, ledger, b"one") as one,
        opened(client, ledger, b"two") as two,
        client.writer(ledger) as plain,
    ):
        for _ in range(3):
            one.update(add(b"1"))
            plain.write(b"three", b"3").result(120)
            two.update(add(b"2"))
        assert (one.fetch(), two.fetch()) == (b"111", b"222")
        with pytest.raises(ConflictError, match=r"holds records of other keys.*nothing was written") as caught:
            one.compact(truncate=True)
        assert "b'three'" in str(caught.value) or "b'two'" in str(caught.value)
    assert first_offsets(site, client, ledger) == [0]
    assert values(site, ledger) == [b"", b"1", b"3", b"", b"2", b"1", b"3", b"2", b"1", b"3", b"2"]


def test_snapshots_truncate_across_scales_and_those_who_lag_go_on(
    site: Site, client: rollbridge.Bridge, ledger: str
) -> None:
    with opened(client, ledger) as one, opened(client, ledger) as lagging, opened(client, ledger) as stale:
        one.update(add(b"a"))
        assert lagging.fetch() == stale.fetch() == b"a"
        client.admin.scale(ledger, seal=[0], ranges=[(0.0, 0.5), (0.5, 1.0)])
        one.update(add(b"b"))
        one.compact(truncate=True)
        assert first_offsets(site, client, ledger)[0] > 0
        assert lagging.fetch() == b"ab"
        client.admin.scale(ledger, seal=[1, 2], ranges=[(0.0, 1.0)])
        assert lagging.fetch() == b"ab"
        one.update(add(b"c"))
        one.update(add(b"d"))
        one.compact(truncate=True)
        one.compact(truncate=True)  # there is hardly anything left to delete
        stale.update_unconditionally([b"e", b"f"])  # names a snapshot that is gone
        with opened(client, ledger) as late:
            assert late.state == lagging.fetch() == stale.fetch() == one.fetch() == b"abcdef"
            late.update(add(b"g"))
        assert one.fetch() == b"abcdefg"
    assert first_offsets(site, client, ledger)[-1] > 0


def test_a_group_that_the_stream_waits_for_keeps_what_it_has_not_read(
    site: Site, client: rollbridge.Bridge, ledger: str, unique_name: Callable[[str], str]
) -> None:
    group = unique_name("group")
    client.admin.update_stream(ledger, retention_groups=[group])
    with opened(client, ledger) as one:
        one.update(add(b"a"))
        with pytest.raises(ConflictError, match=group) as caught:
            one.compact(truncate=True)
        assert "the snapshot itself is written" in str(caught.value.__notes__)
        assert first_offsets(site, client, ledger) == [0]
        with opened(client, ledger) as late:
            assert (late.state, late.bytes_since_snapshot) == (b"a", 0)


def test_records_of_other_keys_are_found_in_whatever_is_continued(client: rollbridge.Bridge, ledger: str) -> None:
    with opened(client, ledger) as one:
        one.update(add(b"a"))
        one.compact(truncate=True)
        client.admin.scale(ledger, seal=[0], ranges=[(0.0, 0.5), (0.5, 1.0)])
        own = client.admin.history(ledger).active.segment_at(KeySpace().position(KEY)).id
        elsewhere = next(
            key
            for key in (b"%d" % number for number in range(100))
            if client.admin.history(ledger).active.segment_at(KeySpace().position(key)).id != own
        )
        with client.writer(ledger) as plain:
            plain.write(elsewhere, b"of somebody else").result(120)
        client.admin.scale(ledger, seal=[1, 2], ranges=[(0.0, 1.0)])
        one.update(add(b"b"))
        with pytest.raises(ConflictError, match=f"holds records of other keys.*{elsewhere!r}.*nothing deleted"):
            one.compact(truncate=True)
        with client.reader(ledger, follow=False) as reader:
            assert b"of somebody else" in [record.value for record in reader]


def test_processes_that_race_end_with_the_same_state(
    site: Site, client: rollbridge.Bridge, ledger: str, tmp_path: Path
) -> None:
    """One is killed, the stream is scaled twice, and all of them compact and truncate."""
    place = (site.cluster.bootstrap_servers, site.cluster.zookeeper, site.root, ledger)
    names = ("anna", "bert", "carl")

    def notes(kind: str, name: str = "*") -> list[str]:
        lines = (path.read_text().split("\n")[:-1] for path in tmp_path.glob(name))
        return [line.removeprefix(f"{kind} ") for line in itertools.chain(*lines) if line.startswith(kind)]

    with share(client, ledger) as watched, share(client, ledger) as lagging:
        workers = [start(work, *place, name, 25, tmp_path / name) for name in names]
        until(lambda: len(notes("told")) >= 15 and notes("told", "bert"))
        kill(workers[1])
        workers.append(start(work, *place, "dora", 25, tmp_path / "dora"))
        client.admin.scale(ledger, seal=[0], ranges=[(0.0, 0.5), (0.5, 1.0)])
        seen: list[Entries] = []

        def watch() -> bool:
            seen.append(watched.fetch())
            return len(seen[-1]) >= 50

        until(watch)
        client.admin.scale(ledger, seal=[1, 2], ranges=[(0.0, 1.0)])
        finish(workers)
        final = watched.fetch()
        assert lagging.fetch() == final
    with share(client, ledger) as late:
        assert late.state == final
    assert all(final[: len(state)] == state for state in seen)
    assert set(notes("told")) <= set(final) <= set(notes("asked"))
    assert len(notes("asked")) - len(notes("told")) <= 1  # what the killed one was about to be told
    for name in (*names, "dora"):
        mine = [entry for entry in final if entry.startswith(name)]
        assert mine == [f"{name}-{number}" for number in range(len(mine))]
    assert max(first_offsets(site, client, ledger)) > 0


def test_threads_share_one_synchronizer(client: rollbridge.Bridge, ledger: str) -> None:
    with opened(client, ledger) as one, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: one.update(add(b"%d" % number)), range(8)))
        assert sorted(one.state) == sorted(b"01234567")


# When things fail ---------------------------------------------------------------------------------------------------


def test_a_lost_answer_is_looked_into(site: Site, client: rollbridge.Bridge, ledger: str, proxy: FaultProxy) -> None:
    with client.synchronizer(ledger, KEY, b"", concatenate, timeout=5) as one:
        one.update(add(b"a"))
        proxy.strike(Api.END_TXN, Point.BEFORE_ANSWER)
        one.update(add(b"b"))
        proxy.await_strike()
        proxy.strike(Api.END_TXN, Point.BEFORE_ANSWER)
        one.compact()
        proxy.await_strike()
        # The commit reaches the broker; from then on nobody answers, but the log can be read.
        proxy.strike(Api.END_TXN, Point.AFTER_REQUEST, times=100_000)
        one.update(lambda state: [b"c", b"d", b"e"])
        proxy.calm()
        assert one.state == one.fetch() == b"abcde"
        with opened(client, ledger) as late:
            assert (late.state, late.sn) == (one.state, one.sn)
    assert values(site, ledger) == [b"", b"a", b"b", b"ab", b"c", b"d", b"e"]


def test_an_update_that_apply_refuses_is_not_written(site: Site, client: rollbridge.Bridge, ledger: str) -> None:
    def whole(state: int, change: int) -> int:
        if state + change < 0:
            raise ValueError("overdrawn")
        return state + change

    with client.synchronizer(ledger, KEY, 5, whole, states=Codec.json(), updates=Codec.json()) as account:
        with pytest.raises(ValueError, match="overdrawn"):
            account.update(lambda balance: [-6])
        assert values(site, ledger) == []
        account.update(lambda balance: [-3])
        with pytest.raises(ValueError, match="overdrawn"):
            account.update(lambda balance: [-1, -2])
        assert account.fetch() == 2
        account.update_unconditionally([-7])
        with pytest.raises(ValueError, match="overdrawn") as caught:
            account.fetch()
        assert str(account.sn.dlsn) not in caught.value.__notes__[0]
        assert account.state == 2
    assert values(site, ledger) == [b"5", b"-3", b"-7"]


# Bad input ----------------------------------------------------------------------------------------------------------


def test_a_state_that_fits_into_no_record_is_refused(site: Site, client: rollbridge.Bridge, scope: str) -> None:
    stream = f"{scope}/small"
    client.admin.create_stream(stream, record_bytes_max=2_000)
    with opened(client, stream) as one:
        for _ in range(3):
            one.update(add(b"x" * 1_000))
        with pytest.raises(RecordTooLargeError, match=r"a snapshot must fit into one record.* 3000 bytes"):
            one.compact()
        with pytest.raises(RecordTooLargeError, match="nothing was written"):
            one.update(add(b"x" * 2_001))
        assert one.fetch() == b"x" * 3_000
    assert len(values(site, stream)) == 4


def test_what_a_generator_may_return(site: Site, client: rollbridge.Bridge, ledger: str) -> None:
    with opened(client, ledger) as one:
        for wrong in (b"bytes", "text", 7, {"a": 1}):
            with pytest.raises(InvalidRequestError, match="a list of updates is wanted"):
                one.update(lambda state, wrong=wrong: wrong)  # type: ignore[misc]
        with pytest.raises(InvalidRequestError, match="unless a codec is given"):
            one.update(lambda state: ["text"])  # type: ignore[list-item]
        with pytest.raises(InvalidRequestError, match="no update to write"):
            one.update_unconditionally([])
        with pytest.raises(InvalidRequestError, match="exceeds 900000"):
            one.update(lambda state: [b"x" * 400_000] * 3)
        assert one.fetch() == b""
    assert values(site, ledger) == [b""]  # the initial state, which the last attempt has written before its updates


def test_what_a_synchronizer_may_be_asked_for(client: rollbridge.Bridge, ledger: str) -> None:
    for key in (None, "text"):
        with pytest.raises(InvalidRequestError, match="needs a key of bytes"):
            client.synchronizer(ledger, key, b"", concatenate)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="unless a codec is given"):
        client.synchronizer(ledger, KEY, {}, lambda state, _: state)
    with pytest.raises(StreamNotFoundError):
        opened(client, f"{ledger}-not")
    with pytest.raises(InvalidRequestError, match="timeout must be positive"):
        client.synchronizer(ledger, KEY, b"", concatenate, timeout=0)
    one = opened(client, ledger)
    assert repr(one) == f"<Synchronizer of {ledger} under b'state'>"
    one.close()
    one.close()
    assert one.closed
    assert one.state == b""
    for asked in (one.fetch, one.compact, lambda: one.update(add(b"")), lambda: one.update_unconditionally([b""])):
        with pytest.raises(InvalidRequestError, match="is closed"):
            asked()


def test_a_connection_closes_its_synchronizers(site: Site, client: rollbridge.Bridge, ledger: str) -> None:
    with site.connect("brief") as brief:
        one = opened(brief, ledger)
    assert one.closed


def test_records_say_what_they_are(client: rollbridge.Bridge, ledger: str) -> None:
    with client.synchronizer(
        ledger, KEY, {"n": 0}, lambda state, step: {"n": state["n"] + step}, states=Codec.json(), updates=Codec.json()
    ) as one:
        one.update(lambda state: [1])
        one.compact()
        with client.reader(ledger, follow=False) as reader:
            found = [(record.value, dict(record.headers)[MARK_HEADER], record.sn) for record in reader]
        first = found[0][2]
        assert isinstance(first, SN)
        assert [(json.loads(value or b""), mark) for value, mark, _ in found] == [
            ({"n": 0}, b"1 snapshot"),
            (1, f"1 update {first.dlsn}".encode()),
            ({"n": 1}, b"1 snapshot"),
        ]
