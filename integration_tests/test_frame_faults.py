"""Frames that meet lost connections, lost answers and refusals: all arrive in their order, or it is told why not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import TopicPartition
from kio.schema.errors import ErrorCode

from integration_tests.clients import Site
from integration_tests.faults import Api, FaultProxy, Point
from integration_tests.kafka_tools import read_all
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.client.sender import FrameSender, Undelivered
from rollbridge.errors import BackpressureError, InvalidRequestError, NotAuthorizedError, NotFoundError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.topics import TopicSpec

KEY = b"k" * 44


@pytest.fixture
def topic(site: Site, unique_name: Callable[[str], str]) -> str:
    """A topic of two partitions."""
    name = unique_name("frames")
    KafkaClient(site.cluster.bootstrap_servers).topics.create_topics([TopicSpec(name=name, partitions=2)])
    return name


@pytest.fixture
def sender(site: Site, proxy: FaultProxy) -> Iterator[FrameSender]:
    """A sender whose requests go through the proxy."""
    sender = FrameSender(KafkaClient(site.cluster.bootstrap_servers, client_id="frames"))
    yield sender
    proxy.calm()
    sender.close(PATIENCE_S)


class Frames:
    """Frames sent from several threads, each with a partition of its own, and what is told of each."""

    def __init__(self, sender: FrameSender, topic: str) -> None:
        self.sender, self.topic = sender, topic
        self.told: list[list[int]] = [[], []]
        self.faults: list[Undelivered] = []
        self.sent = [0, 0]
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(2)]

    def __enter__(self) -> Frames:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        eventually(lambda: [len(told) for told in self.told] == self.sent, "every frame is told of")

    def send(self, partition: int) -> int:
        number = self.sent[partition]

        def delivered(fault: Undelivered | None) -> None:
            if fault is not None:
                self.faults.append(fault)
            self.told[partition].append(number)

        self.sender.send(self.topic, partition, KEY, b"%d" % number, delivered)
        self.sent[partition] += 1
        return number

    def grow(self, count: int) -> None:
        """Return once this many more have been told of."""
        wanted = sum(len(told) for told in self.told) + count
        eventually(lambda: sum(len(told) for told in self.told) >= wanted, "frames are delivered")

    def _run(self, partition: int) -> None:
        while not self._stopping.is_set():
            number = self.send(partition)
            while number - len(self.told[partition]) > 50 and not self._stopping.wait(0.001):
                pass


def stored(site: Site, topic: str, partition: int) -> list[int]:
    """Numbers of the frames in a partition, as they stand there."""
    found = read_all(site.cluster.bootstrap_servers, TopicPartition(topic, partition))
    return [int(value or b"") for value in found]


@pytest.mark.parametrize(
    ("point", "error"),
    [
        (Point.BEFORE_REQUEST, ErrorCode.none),
        (Point.AFTER_REQUEST, ErrorCode.none),
        (Point.BEFORE_ANSWER, ErrorCode.none),
        (Point.REFUSED, ErrorCode.not_leader_or_follower),
        (Point.REFUSED, ErrorCode.not_enough_replicas),
        (Point.REFUSED, ErrorCode.out_of_order_sequence_number),
        (Point.REFUSED, ErrorCode.unknown_producer_id),
        (Point.REFUSED, ErrorCode.invalid_producer_epoch),
        (Point.REFUSED, ErrorCode.unknown_topic_or_partition),
        (Point.REFUSED, ErrorCode.corrupt_message),
        (Point.REFUSED, ErrorCode.none),  # acknowledged without an offset, and lost
        (Point.MISREPORTED, ErrorCode.none),  # the same, and written
        (Point.MISREPORTED, ErrorCode.not_enough_replicas_after_append),
        (Point.MISREPORTED, ErrorCode.request_timed_out),
        (Point.REFUSED, ErrorCode.unknown_server_error),
        (Point.MISREPORTED, ErrorCode.unknown_server_error),
    ],
    ids=lambda item: item.name.lower(),
)
def test_frames_arrive_in_their_order_whatever_happens_on_the_way(
    site: Site, sender: FrameSender, proxy: FaultProxy, topic: str, point: Point, error: ErrorCode
) -> None:
    with Frames(sender, topic) as frames:
        frames.grow(200)
        for _ in range(2):
            proxy.strike(Api.PRODUCE, point, after=1, times=2, error=error)
            proxy.await_strike()
            frames.grow(200)
    assert not frames.faults
    for partition, count in enumerate(frames.sent):
        assert frames.told[partition] == list(range(count)), "each is told of once, in its order"
        found = stored(site, topic, partition)
        assert list(dict.fromkeys(found)) == list(range(count)), "nothing is missing, nothing overtakes"
        assert len(found) == count, "nothing stands there twice"


@pytest.mark.parametrize(
    ("error", "raised", "closed"),
    [
        (ErrorCode.message_too_large, InvalidRequestError, True),
        (ErrorCode.topic_authorization_failed, NotAuthorizedError, False),
        (ErrorCode.policy_violation, InvalidRequestError, False),
    ],
    ids=lambda item: getattr(item, "name", None),
)
def test_what_brokers_refuse_for_good_is_told_and_later_frames_are_sent(
    site: Site,
    sender: FrameSender,
    proxy: FaultProxy,
    topic: str,
    error: ErrorCode,
    raised: type[Exception],
    closed: bool,
) -> None:
    frames = Frames(sender, topic)
    frames.send(0)
    eventually(lambda: len(frames.told[0]) == 1, "the first is delivered")
    proxy.strike(Api.PRODUCE, Point.REFUSED, error=error)
    frames.send(0)
    eventually(lambda: len(frames.told[0]) == 2, "the second is told of")
    frames.send(0)
    eventually(lambda: len(frames.told[0]) == 3, "the third is delivered")
    [fault] = frames.faults
    assert (fault.code, fault.is_refusal, bool(fault.closed)) == (error, True, closed)
    assert isinstance(fault.error("send it"), raised)
    assert stored(site, topic, 0) == [0, 2]


@pytest.mark.parametrize(
    ("point", "error"),
    [
        (Point.BEFORE_ANSWER, ErrorCode.none),
        (Point.MISREPORTED, ErrorCode.request_timed_out),
        (Point.MISREPORTED, ErrorCode.none),
    ],
    ids=lambda item: item.name.lower(),
)
def test_a_frame_that_may_stand_in_a_buffer_that_was_closed_meanwhile_is_not_called_refused(
    site: Site, sender: FrameSender, proxy: FaultProxy, topic: str, point: Point, error: ErrorCode
) -> None:
    frames = Frames(sender, topic)
    proxy.strike(Api.PRODUCE, point, error=error)
    proxy.strike(Api.PRODUCE, Point.REFUSED, error=ErrorCode.message_too_large, also=True)
    frames.send(0)
    eventually(lambda: len(frames.told[0]) == 1, "it is told of")
    [fault] = frames.faults
    assert (bool(fault.closed), fault.is_refusal) == (True, False)
    assert stored(site, topic, 0) == [0]


def test_what_is_called_a_duplicate_is_delivered(
    site: Site, sender: FrameSender, proxy: FaultProxy, topic: str
) -> None:
    frames = Frames(sender, topic)
    proxy.strike(Api.PRODUCE, Point.MISREPORTED, error=ErrorCode.duplicate_sequence_number, times=1_000)
    for count in range(1, 4):
        frames.send(0)
        eventually(lambda count=count: len(frames.told[0]) == count, "it is told of")  # type: ignore[misc]
    assert not frames.faults
    assert stored(site, topic, 0) == [0, 1, 2]


def test_an_answer_that_never_makes_sense_is_given_up_as_unknown(
    site: Site, sender: FrameSender, proxy: FaultProxy, topic: str
) -> None:
    frames = Frames(sender, topic)
    proxy.strike(Api.PRODUCE, Point.MISREPORTED, error=ErrorCode.unknown_server_error, times=1_000)
    frames.send(0)
    eventually(lambda: len(frames.told[0]) == 1, "it is told of")
    [fault] = frames.faults
    assert not fault.is_refusal
    proxy.calm()
    frames.send(0)
    eventually(lambda: len(frames.told[0]) == 2, "the next is delivered")
    assert set(stored(site, topic, 0)) == {0, 1}


def test_a_principal_that_may_write_nowhere_is_told_so(sender: FrameSender, proxy: FaultProxy, topic: str) -> None:
    proxy.strike(Api.INIT_PRODUCER_ID, Point.REFUSED, error=ErrorCode.cluster_authorization_failed)
    frames = Frames(sender, topic)
    frames.send(1)
    eventually(lambda: len(frames.told[1]) == 1, "it is told of")
    assert [(fault.code, fault.is_refusal) for fault in frames.faults] == [
        (ErrorCode.cluster_authorization_failed, True)
    ]
    frames.send(1)
    eventually(lambda: len(frames.told[1]) == 2, "the next one is delivered, with the right given meanwhile")
    assert len(frames.faults) == 1


def test_what_goes_to_a_topic_that_never_existed_fails(
    sender: FrameSender, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollbridge.client.sender._ABSENT_S", 1.0)
    nowhere, somewhere = Frames(sender, f"{topic}.not"), Frames(sender, topic)
    for frames in (nowhere, somewhere):
        frames.send(0)
    eventually(lambda: len(nowhere.told[0]) == 1 and len(somewhere.told[0]) == 1, "both are told of")
    [fault] = nowhere.faults
    assert fault.closed.startswith("it is gone")
    assert fault.is_refusal
    assert isinstance(fault.error("send it"), NotFoundError)
    assert not somewhere.faults


@pytest.mark.parametrize("error", [ErrorCode.topic_authorization_failed, ErrorCode.invalid_topic_exception])
def test_what_a_look_up_refuses_is_no_fault_of_other_partitions(
    site: Site, sender: FrameSender, proxy: FaultProxy, topic: str, error: ErrorCode
) -> None:
    """The leader of a partition is looked up while frames of another one of the topic are in flight."""
    told: dict[str, Undelivered | None] = {}

    def send(partition: int, name: str) -> None:
        value = name.encode().ljust(20_000, b".")  # so large that each is a batch of its own
        sender.send(topic, partition, KEY, value, lambda fault: told.__setitem__(name, fault))

    for partition in range(2):
        send(partition, f"first of {partition}")
    eventually(lambda: len(told) == 2, "both are delivered")
    proxy.strike(Api.PRODUCE, Point.LATE, error=ErrorCode.not_leader_or_follower)
    proxy.strike(Api.METADATA, Point.REFUSED, error=error, also=True)
    produced = proxy.requests.count(Api.PRODUCE)
    send(1, "misdirected")
    for number in range(1, 5):
        eventually(lambda number=number: proxy.requests.count(Api.PRODUCE) == produced + number, "it is on its way")  # type: ignore[misc]
        send(0, f"in flight {number}")
    eventually(lambda: proxy.requests.count(Api.PRODUCE) == produced + 5, "no more may be in flight")
    send(0, "behind them")
    proxy.let_answer()
    eventually(lambda: len(told) == 3, "the look-up refuses what it was made for")
    fault = told["misdirected"]
    assert fault is not None
    assert (fault.code, fault.is_refusal) == (error, True)
    for _ in range(10):
        proxy.let_answer()
    eventually(lambda: len(told) == 8, "all are told of")
    assert [name for name, fault in told.items() if fault is not None] == ["misdirected"]
    found = read_all(site.cluster.bootstrap_servers, TopicPartition(topic, 0))
    names = ["first of 0", *(f"in flight {number}" for number in range(1, 5)), "behind them"]
    assert [(value or b"").rstrip(b".").decode() for value in found] == names


def test_a_topic_is_not_missed_while_nobody_can_be_asked(
    site: Site, sender: FrameSender, proxy: FaultProxy, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that has just come back may not know it yet, as it may have not before it went away for long."""
    monkeypatch.setattr("rollbridge.client.sender._ABSENT_S", 0.5)
    frames = Frames(sender, topic)
    proxy.strike(Api.PRODUCE, Point.REFUSED, error=ErrorCode.unknown_topic_or_partition)
    proxy.strike(Api.PRODUCE, Point.BEFORE_REQUEST, times=10, also=True)
    proxy.strike(Api.PRODUCE, Point.REFUSED, error=ErrorCode.unknown_topic_or_partition, also=True)
    frames.send(0)
    eventually(lambda: len(frames.told[0]) == 1, "it is told of")
    assert not frames.faults
    assert stored(site, topic, 0) == [0]


def test_who_sends_waits_for_room_and_is_refused_in_the_end(site: Site, proxy: FaultProxy, topic: str) -> None:
    sender = FrameSender(
        KafkaClient(site.cluster.bootstrap_servers, client_id="frames"), buffer_bytes=2_000_000, block_s=0.5
    )
    told: list[Undelivered | None] = []
    proxy.strike(Api.PRODUCE, Point.BEFORE_REQUEST, times=1_000_000)
    sent = 0

    def send_on() -> None:
        nonlocal sent
        while True:
            sender.send(topic, 0, KEY, b"." * 100_000, told.append)
            sent += 1

    with pytest.raises(BackpressureError, match="not written"):
        send_on()
    assert 1_800_000 <= sent * 100_000 <= 2_000_000
    proxy.calm()
    assert sender.close(PATIENCE_S) == 0
    assert told == [None] * sent
    with pytest.raises(InvalidRequestError, match="closed"):
        sender.send(topic, 0, KEY, b"late", told.append)


def test_closing_tells_how_many_were_not_acknowledged(site: Site, proxy: FaultProxy, topic: str) -> None:
    sender = FrameSender(KafkaClient(site.cluster.bootstrap_servers, client_id="frames"))
    proxy.strike(Api.PRODUCE, Point.SILENT, times=1_000_000)
    told: list[Undelivered | None] = []
    for _ in range(3):
        sender.send(topic, 0, KEY, b"x", told.append)
    assert sender.close(0.5) == 3
    assert told == []


@pytest.mark.logs_defects
def test_a_callback_may_send_and_may_raise(site: Site, sender: FrameSender, topic: str) -> None:
    told: list[int] = []

    def delivered(_: Undelivered | None) -> None:
        told.append(len(told))
        if len(told) < 5:
            sender.send_soon(topic, 0, KEY, b"%d" % len(told), delivered)
        raise RuntimeError("of the application")

    sender.send(topic, 0, KEY, b"0", delivered)
    assert sender.wait_until(lambda: len(told) == 5, PATIENCE_S)
    assert stored(site, topic, 0) == [0, 1, 2, 3, 4]
