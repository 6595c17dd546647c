"""Streams that are deleted and created again under their names: nothing of two lives is taken for each other."""

from __future__ import annotations

from contextlib import suppress

import pytest

import rollbridge
from integration_tests.clients import Site
from integration_tests.coordinators import until
from rollbridge import EMPTY
from rollbridge.base.sn import SN
from rollbridge.errors import (
    InvalidRequestError,
    RollbridgeError,
    StreamNotFoundError,
    StreamRecreatedError,
    TruncatedError,
)
from rollbridge.kafka.client import KafkaClient

KEYS = [f"key-{number}".encode() for number in range(20)]


def write_all(client: rollbridge.Bridge, stream: str, life: str) -> rollbridge.TransactionId:
    """One record for each key in a transaction."""
    with client.begin(stream) as transaction:
        for key in KEYS:
            transaction.write(stream, key=key, value=f"{life}-{key.decode()}".encode())
    return transaction.id


def create_again(client: rollbridge.Bridge, stream: str, segments: int = 1) -> None:
    """Another life, of the same shape."""
    client.admin.delete_stream(stream)
    client.admin.create_stream(stream, segments=segments)


def values(client: rollbridge.Bridge, stream: str, **options: object) -> list[str]:
    with client.reader(stream, follow=False, **options) as reader:  # type: ignore[arg-type]
        return sorted((record.value or b"").decode() for record in reader)


def test_no_topic_name_is_used_by_two_lives(client: rollbridge.Bridge, ledger: str) -> None:
    topics: set[str] = set()
    for life in range(3):
        (config,) = client.admin.list_streams(ledger.partition("/")[0])
        history = client.admin.history(ledger)
        used = {config.buffer_topic, *(config.name.segment_topic(item) for item in history.segments())}
        assert topics.isdisjoint(used)
        topics |= used
        write_all(client, ledger, str(life))
        assert values(client, ledger) == sorted(f"{life}-{key.decode()}" for key in KEYS)
        create_again(client, ledger)


def test_positions_and_sequence_numbers_of_a_former_life_are_refused(client: rollbridge.Bridge, ledger: str) -> None:
    with client.cas_writer(ledger) as writer:
        old = writer.write(b"key", b"old", expected=EMPTY)
    with client.reader(ledger, follow=False) as reader:
        list(reader)
        position = reader.position
    create_again(client, ledger)
    assert old.dlsn is not None
    for start in (position, str(position), old, old.dlsn):
        with pytest.raises(StreamRecreatedError, match="deleted"):
            client.reader(ledger, start=start)
    with pytest.raises(RollbridgeError, match="deleted"):
        client.admin.truncate(ledger, position)
    with client.cas_writer(ledger) as writer:
        for stale in (old, SN(dlsn=old.dlsn), SN(sequence_id=old.sequence_id)):
            for scope in ("key", "segment"):
                with pytest.raises(RollbridgeError):
                    writer.write(b"key", b"stale", expected=stale, scope=scope)
                transaction = client.begin(ledger)
                with pytest.raises(InvalidRequestError, match="deleted"):
                    transaction.expect(ledger, key=b"key", sn=stale, scope=scope)
                transaction.abort()
        assert writer.tail(b"key") == EMPTY
        new = writer.write(b"key", b"new", expected=EMPTY)
        assert writer.tail(b"key") == new
    assert values(client, ledger) == ["new"]


def test_transactions_of_a_former_life_are_reported_as_deleted_and_readers_go_on(
    client: rollbridge.Bridge, ledger: str, orders: str, scope: str
) -> None:
    first = write_all(client, ledger, "first")
    both = client.begin(ledger, orders)
    for stream in (ledger, orders):
        both.write(stream, key=b"both", value=b"both")
    both.commit()
    create_again(client, ledger)
    with client.writer(ledger) as writer:
        for key in KEYS:
            writer.write(key, b"plain").result(120)
    second = write_all(client, ledger, "second")
    seen: dict[rollbridge.TransactionId, list[str] | None] = {}
    with client.transactions(scope, follow=False) as transactions:
        for transaction in transactions:
            try:
                seen[transaction.id] = [(record.value or b"").decode() for record in transaction.records()]
            except TruncatedError:
                seen[transaction.id] = None
    assert seen == {first: None, both.id: None, second: [f"second-{key.decode()}" for key in KEYS]}


def test_a_client_that_was_away_writes_nothing_into_another_life(
    site: Site, client: rollbridge.Bridge, ledger: str, orders: str
) -> None:
    with site.connect("away") as away:
        asleep = away.begin(ledger, orders)
        write_all(away, ledger, "first")
        writer, cas = away.writer(ledger), away.cas_writer(ledger)
        writer.write(KEYS[0], b"plain").result(120)
        cas.write(KEYS[1], b"cas", expected=cas.tail(KEYS[1]))
        follower = away.reader(ledger)
        assert follower.poll(30) is not None
        asleep.abort()
        late = away.begin(orders, ledger)
        late.write(orders, key=b"k", value=b"kept waiting")
        late.flush()
        with pytest.raises(RollbridgeError):
            client.admin.delete_stream(ledger)  # it is open
        late.abort()
        create_again(client, ledger, segments=4)
        write_all(client, ledger, "second")
        # What began before, or knows only what was before.
        with pytest.raises(StreamNotFoundError, match="open a new writer"):
            writer.write(KEYS[0], b"stale").result(120)
        with follower, pytest.raises(StreamRecreatedError):
            list(follower)
        assert cas.tail(KEYS[1]) != EMPTY
        write_all(away, ledger, "third")
        with away.writer(ledger) as fresh:
            fresh.write(KEYS[0], b"fresh").result(120)
    expected = [f"{life}-{key.decode()}" for life in ("second", "third") for key in KEYS] + ["fresh"]
    assert values(client, ledger) == sorted(expected)


@pytest.mark.long
def test_a_transaction_whose_buffer_is_gone_keeps_no_other_from_being_sent(
    site: Site, client: rollbridge.Bridge, ledger: str, orders: str
) -> None:
    (config,) = [item for item in client.admin.list_streams(ledger.partition("/")[0]) if str(item.name) == ledger]
    with site.connect("sender", rollbridge.ClientOptions(linger_s=0.05)) as sender:
        lost = sender.begin(ledger)
        lost.write(ledger, key=b"k", value=b"lost")
        lost.flush()
        with KafkaClient(site.cluster.bootstrap_servers) as kafka:
            topics = kafka.topics
            topics.delete_topics([config.buffer_topic])

        def is_known_to_be_gone() -> bool:
            try:
                lost.write(ledger, key=b"k", value=b"lost")
                lost.flush()
            except RollbridgeError:
                return True
            return False

        until(is_known_to_be_gone)
        with suppress(RollbridgeError):
            lost.write(ledger, key=b"k", value=b"stays in its batch")
        healthy = sender.begin(orders)
        healthy.write(orders, key=b"k", value=b"healthy")
        with client.reader(orders, isolation="read_uncommitted") as reader:
            found = reader.poll(30)
        assert found is not None
        assert found.value == b"healthy"
        healthy.abort()
