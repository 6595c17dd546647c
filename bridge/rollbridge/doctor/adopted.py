"""Checks of the doctor on topics that are not rollbridge's: adopted ones, and those with names of streams. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollbridge.buffer.table import State
from rollbridge.doctor.facts import ClusterFacts, Finding, StreamFacts, problem, warning, wrong_seal
from rollbridge.metadata.changes import TOPIC_CLOSED, TOPIC_DELETED, TOPIC_RECREATED, WATCHED
from rollbridge.metadata.records import SEGMENTS_MAX, TopicNames
from rollbridge.stream.config import FOREVER, StreamState, outlived


def adopted_topics(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect adopted topics to be those that were adopted, each of one stream, which the index of topics names."""
    owners: dict[str, list[StreamFacts]] = {}
    for stream in facts.streams:
        if stream.config.topic and stream.config.state is StreamState.ACTIVE:
            owners.setdefault(stream.config.topic, []).append(stream)
    for name, streams in owners.items():
        for stream in streams:
            yield from _adopted(facts, stream)
        yield from _claim(facts, name, [str(stream.config.name) for stream in streams])
    for name, owner in facts.claims.items():
        if name not in owners and not any(stream.config.topic == name for stream in facts.streams):
            yield warning(
                "topic-index",
                f"the index says that stream {owner} has adopted topic {name}, but that stream has not",
                f"nothing, if the topic is to stay a plain one; rollbridge stream adopt {name} takes it over",
            )


def topic_names(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect no topic at the brokers by whose name producers at gateways know a stream."""
    names = TopicNames.of((stream.config for stream in facts.streams), facts.named)
    for topic, config in names.clashes.items():
        yield (problem if facts.gateways else warning)(
            "name-clash",
            f"the brokers have topic {topic}, by whose name producers at gateways would know stream {config.name}: "
            "they reach the topic, and not the stream",
            f"if it is not needed: kafka-topics.sh --bootstrap-server {facts.bootstrap_servers} --delete --topic "
            f"{topic}; else create a stream of another name for these producers",
        )


def _adopted(facts: ClusterFacts, stream: StreamFacts) -> Iterator[Finding]:
    config, history = stream.config, stream.history
    topic = facts.adopted.get(config.topic)
    kept = {item for item in (history.segments() if history else ()) if config.places.is_adopted(item)}
    if history is not None and kept <= history.removed:
        return  # it has left the topic, and nothing of the stream is there any more
    is_active = history is None or config.is_on_topic(history.active)
    if topic is None and config.topic in facts.hidden:
        if stream.error is not None and stream.error.code in WATCHED:
            yield problem(stream.error.code, f"stream {config.name}: {stream.error.reason}", _anew(config.topic))
        return
    who = f"topic {config.topic}, which stream {config.name} has adopted,"
    if not is_active:
        if topic is None or str(topic.topic_id) != config.topic_id:
            yield problem(
                "segment-gone",
                f"{who} is gone, with the records of before the stream has left it",
                "nothing: within a minute its segments are removed, and readers continue behind them",
            )
        elif not topic.sealed and not facts.is_busy:
            yield wrong_seal(topic, active=False)
        return
    if topic is None:
        yield problem(
            TOPIC_DELETED,
            f"{who} was deleted: commits end as aborted",
            f"rollbridge stream release {config.topic}, which ends what is open as aborted",
        )
    elif str(topic.topic_id) != config.topic_id:
        yield problem(
            TOPIC_RECREATED,
            f"{who} was deleted and created again (its id is {topic.topic_id}, and was {config.topic_id}): "
            "commits end as aborted",
            _anew(config.topic),
        )
    elif topic.partitions > SEGMENTS_MAX:
        yield problem(
            "topic-size",
            f"{who} has {topic.partitions} partitions, of which {SEGMENTS_MAX} can be segments of a stream: readers do "
            f"not see the records in partitions {config.partitions} and above",
            "read them with native clients, and share the records among several topics",
        )
    elif topic.partitions > config.partitions:
        yield warning(
            "partitions-added",
            f"{who} has {topic.partitions} partitions, of which {config.partitions} are its segments so far",
            "nothing: the leader of its group takes the others in at its next look, every 10 s",
        )
    elif stream.error is not None and stream.error.code == TOPIC_CLOSED:
        yield problem(
            TOPIC_CLOSED,
            f"stream {config.name}: {stream.error.reason}",
            f"set max.message.bytes of topic {config.topic} to what its records need",
        )
    elif topic.sealed and not facts.is_busy:
        yield problem(
            "seal",
            f"{who} is sealed, but active",
            "restart the coordinator that leads its group: a takeover finishes a scale that was begun. One that was "
            "lost with a ZooKeeper that was set back has to be asked for again (--leave-topic), or "
            f"rollbridge stream release {config.topic} opens the topic",
        )


def retentions(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect adopted topics to keep records for as long as the transactions that write them may be open."""
    for stream in facts.streams:
        config = stream.config
        if stream.history is None or (kept_ms := config.kept_in(stream.history.active)) == FOREVER:
            continue
        found = [
            item
            for group in facts.groups
            for item in group.transactions
            if str(config.name) in item.streams and item.state == State.OPEN.value and item.lease_ms > kept_ms
        ]
        if not found:
            continue
        first = min(found, key=lambda item: item.begun_ms)
        old = outlived(config.topic, kept_ms, first.begun_ms, facts.now_ms)
        yield (warning if old is None else problem)(
            "short-retention",
            f"transaction {first.id} of client {first.client_name} may be open for {first.lease_ms // 1000} s, and "
            f"topic {config.topic} keeps records for {kept_ms // 1000} s (retention.ms), from when they were written; "
            f"{old or 'nothing of it is that old yet'}",
            f"before it is committed: rollbridge stream update {config.topic} --timestamps commit, so that retention "
            "counts from the commit; or have the topic's owner raise retention.ms",
        )


def _anew(topic: str) -> str:
    return f"rollbridge stream release {topic}, and rollbridge stream adopt {topic}; what is open ends as aborted"


def _claim(facts: ClusterFacts, topic: str, owners: Sequence[str]) -> Iterator[Finding]:
    claim = facts.claims.get(topic)
    if len(owners) > 1:
        yield problem(
            "topic-index",
            f"several streams have adopted topic {topic}: {', '.join(owners)}; the index names {claim or 'none'}",
            "write to one of them only, and release the others by their own names when their transactions have ended: "
            "rollbridge stream release SCOPE/STREAM leaves the topic as it is",
        )
    elif claim != owners[0]:
        yield problem(
            "topic-index",
            f"the index does not say that stream {owners[0]} has adopted topic {topic}, but {claim or 'nothing'}: the "
            "topic's name does not lead to the stream",
            "the leader of its group writes a missing entry within seconds; to replace a wrong one: rollbridge repair",
        )
