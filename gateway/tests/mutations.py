"""Requests of all APIs that a gateway decodes, and what may become of them on their way."""

from __future__ import annotations

import random

from rollbridge.kafka.records import BatchBuilder, stamp
from rollbridge_gateway.protocol import wire
from rollbridge_gateway.protocol.versions import TABLE, Api, Handling


def captures(topic: str) -> list[bytes]:
    """Sound requests of all APIs that a gateway decodes, in all versions, with their lengths."""
    builder = BatchBuilder(10_000)
    for number in range(3):
        builder.append(number, b"key", b"value", [("h", b"x")])
    batch = stamp(builder.build(), producer_id=(1 << 62) + 5, producer_epoch=1, base_sequence=0)
    fields = {
        "transactional_id": "hostile",
        "v3_and_below_transactional_id": "hostile",
        "producer_id": (1 << 62) + 5,
        "v3_and_below_producer_id": (1 << 62) + 5,
        "producer_epoch": 1,
        "v3_and_below_producer_epoch": 1,
        "acks": -1,
        "group_id": "hostile-group",
        "key": "hostile",
        "key_type": 1,
        "coordinator_keys": ["hostile", "more"],
        "client_software_name": "hostile",
        "client_software_version": "1",
        "topic_data": [{"name": topic, "partition_data": [{"index": 0, "records": batch}]}],
        "v3_and_below_topics": [{"name": topic, "partitions": [0, 1]}],
        "transactional_ids": ["hostile"],
        "resources": [
            {"resource_type": 2, "resource_name": topic},
            {"resource_type": 4, "resource_name": "1000000000"},
        ],
    }
    topics = {
        Api.METADATA: [{"name": topic}],
        Api.TXN_OFFSET_COMMIT: [
            {"name": topic, "partitions": [{"partition_index": 0, "committed_offset": 4, "committed_metadata": "m"}]}
        ],
        Api.DESCRIBE_PRODUCERS: [{"name": topic, "partition_indexes": [0]}],
        Api.DESCRIBE_TOPIC_PARTITIONS: [{"name": topic}],
        Api.LIST_OFFSETS: [{"name": topic, "partitions": [{"partition_index": 0, "timestamp": -1}]}],
        Api.OFFSET_FOR_LEADER_EPOCH: [{"topic": topic, "partitions": [{"partition": 0, "leader_epoch": 0}]}],
    }
    found = []
    for key, served in TABLE.items():
        if served.room is Handling.RELAYED:
            continue
        for version in range(served.low, served.high + 1):
            if key == Api.PRODUCE and version < 3:
                continue
            values = {**fields, "topics": topics.get(Api(key), [])}
            found.append(wire.framed(wire.write_request(key, version, 7, "hostile", values)))
    return found


def mutated(data: bytes, dice: random.Random) -> bytes:
    """Another version of a request, most of them broken."""
    made = bytearray(data)
    for _ in range(dice.randrange(1, 5)):
        at = dice.randrange(len(made))
        match dice.randrange(6):
            case 0:
                made[at] ^= 1 << dice.randrange(8)
            case 1:
                made[at] = dice.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del made[at : at + dice.randrange(1, 9)]
            case 3:
                made[at:at] = dice.randbytes(dice.randrange(1, 9))
            case 4:
                made[at : at + 4] = dice.choice((b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\0\0\0\0"))
            case _:
                made[at:at] = made[at : at + dice.randrange(1, 30)]
        if not made:
            return b"\0"
    if dice.random() < 0.8 and len(made) > 4:  # with its own length, so that what is inside is looked at
        made[:4] = (len(made) - 4).to_bytes(4, "big")
    return bytes(made)
