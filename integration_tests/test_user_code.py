"""Iterators and callbacks of the application that block, call again, raise and exit: nobody else notices."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rollbridge
from integration_tests.patience import PATIENCE_S
from rollbridge.base.deadlines import CHUNK, next_chunk
from rollbridge.errors import InvalidRequestError

Rows = Iterator[tuple[bytes, bytes]]


def values(client: rollbridge.Bridge, stream: str) -> list[bytes | None]:
    with client.reader(stream, follow=False) as reader:
        return [record.value for record in reader]


class Broken(Exception):
    """Raised by the application."""


def test_what_an_iterator_gave_before_it_raised_is_kept() -> None:
    def rows() -> Iterator[int]:
        yield from range(CHUNK + 3)
        raise Broken

    iterator = rows()
    first, fault = next_chunk(iterator)
    assert (first, fault) == (list(range(CHUNK)), None)
    rest, fault = next_chunk(iterator)
    assert rest == [CHUNK, CHUNK + 1, CHUNK + 2]
    assert isinstance(fault, Broken)
    assert next_chunk(iterator) == ([], None)


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "transaction"])
def test_an_iterator_may_write_by_itself_and_take_its_time(client: rollbridge.Bridge, orders: str, plain: bool) -> None:
    writer = client.writer(orders)
    transaction = client.begin(orders)
    go_on = threading.Event()
    begun = threading.Event()

    def rows() -> Rows:
        yield b"a", b"1"
        begun.set()
        assert go_on.wait(PATIENCE_S), "somebody else could not write"
        if plain:
            writer.write(b"b", b"by itself")
        else:
            transaction.write(orders, key=b"b", value=b"by itself")
        yield b"c", b"2"
        raise Broken

    def write() -> None:
        with pytest.raises(Broken):
            writer.write_all(rows()) if plain else transaction.write_all(orders, rows())

    thread = threading.Thread(target=write)
    thread.start()
    assert begun.wait(PATIENCE_S)
    writer.write(b"d", b"of somebody else").result(PATIENCE_S)
    transaction.write(orders, key=b"d", value=b"of the same")
    transaction.flush(PATIENCE_S)
    go_on.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    writer.flush()
    transaction.commit()
    assert sorted(map(bytes, filter(None, values(client, orders)))) == sorted(
        [b"1", b"2", b"by itself", b"of somebody else", b"of the same"]
    )


def test_callbacks_that_exit_end_no_thread_of_ours(client: rollbridge.Bridge, orders: str, ledger: str) -> None:
    called = threading.Semaphore(0)

    def leave(*_: Any) -> None:
        called.release()
        sys.exit(3)

    writer = client.writer(orders)
    with client.cas_writer(ledger) as conditional:
        for _ in range(2):  # those of the second round depend on the threads that called in the first
            writer.write(b"k", b"plain").add_done_callback(leave)
            transaction = client.begin(orders)
            transaction.write(orders, key=b"k", value=b"in a transaction").add_done_callback(leave)
            transaction.commit_async().add_done_callback(leave)
            conditional.write_async(b"k", b"conditional", expected=rollbridge.ANY).add_done_callback(leave)
            for _ in range(4):
                assert called.acquire(timeout=PATIENCE_S), "a callback was not called"
        writer.write(b"k", b"at last").result(PATIENCE_S)
        conditional.write(b"k", b"at last", expected=rollbridge.ANY)
    with client.transaction(orders) as txn:
        txn.write(orders, key=b"k", value=b"at last")
    assert values(client, orders).count(b"at last") == 2


def test_callbacks_may_write_and_commit_by_themselves(client: rollbridge.Bridge, orders: str, ledger: str) -> None:
    writer = client.writer(orders)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def again(value: bytes) -> Callable[..., None]:
        def called(*_: Any) -> None:
            writer.write(b"k", value + b", plain").add_done_callback(answers.put)
            transaction = client.begin(orders)
            transaction.write(orders, key=b"k", value=value + b", in a transaction")
            transaction.commit_async().add_done_callback(answers.put)

        return called

    transaction = client.begin(orders)
    transaction.write(orders, key=b"k", value=b"x").add_done_callback(again(b"after a record"))
    transaction.commit_async().add_done_callback(again(b"after a commit"))
    writer.write(b"k", b"y").add_done_callback(again(b"after a plain record"))
    with client.cas_writer(ledger) as conditional:
        future = conditional.write_async(b"k", b"z", expected=rollbridge.ANY)
        future.add_done_callback(again(b"after a conditional record"))
        for _ in range(8):
            answers.get(timeout=PATIENCE_S).result(0)
    found = [value for value in values(client, orders) if value is not None and b"after" in value]
    assert len(set(found)) == len(found) == 8


def test_who_makes_updates_holds_up_nobody_and_loses_none(client: rollbridge.Bridge, ledger: str) -> None:
    def opened() -> rollbridge.Synchronizer[bytes, bytes]:
        return client.synchronizer(ledger, b"state", b"", lambda state, update: state + update)

    with opened() as one, opened() as other:
        go_on, begun = threading.Event(), threading.Event()

        def slow(state: bytes) -> list[bytes]:
            begun.set()
            assert go_on.wait(PATIENCE_S), "a fetch of another thread did not come back"
            return [b"slow"] if b"slow" not in state else []

        thread = threading.Thread(target=one.update, args=(slow,))
        thread.start()
        assert begun.wait(PATIENCE_S)
        other.update(lambda state: [b"fast,"])
        assert one.fetch() == b"fast,"
        go_on.set()
        thread.join(PATIENCE_S)
        assert one.fetch() == other.fetch() == b"fast,slow"

        def by_itself(state: bytes) -> list[bytes]:
            one.update(lambda inner: [b"lost?"])
            return [b"never"]

        with pytest.raises(InvalidRequestError, match="nothing was written"):
            one.update(by_itself)
        with pytest.raises(InvalidRequestError, match="nothing was written"):
            one.compact(lambda state: by_itself(state)[0])
        assert one.fetch() == b"fast,slow"
