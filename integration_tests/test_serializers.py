"""confluent-kafka's own serializers and Schema Registry client work on top of Producer and Consumer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

import rollbridge
from integration_tests.clients import Site
from integration_tests.patience import PATIENCE_S
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.topics import TopicSpec

ORDER = {"number": 7, "item": "Grüße"}
AVRO = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "number", "type": "long"}, {"name": "item", "type": "string"}],
    }
)
JSON = json.dumps(
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Order",
        "type": "object",
        "properties": {"number": {"type": "integer"}, "item": {"type": "string"}},
        "required": ["number"],
    }
)


class Registry(BaseHTTPRequestHandler):
    """As much of a Schema Registry as serializers ask for: schemas by subject and by id."""

    schemas: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        subject = self.path.split("/")[2]
        known = [item for item in self.schemas if item["subject"] == subject and item["schema"] == body["schema"]]
        if not known:
            known = [{**body, "subject": subject, "id": len(self.schemas) + 1, "version": 1}]
            self.schemas.extend(known)
        self._answer(known[0])

    def do_GET(self) -> None:
        words = self.path.partition("?")[0].split("/")
        if words[1:3] == ["schemas", "ids"] and int(words[3]) <= len(self.schemas):
            self._answer(self.schemas[int(words[3]) - 1])
        else:
            self._answer({"error_code": 40401, "message": "not found"}, 404)

    def _answer(self, value: object, code: int = 200) -> None:
        raw = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def registry() -> Iterator[SchemaRegistryClient]:
    """A client of a registry of its own."""
    handler = type("OwnRegistry", (Registry,), {"schemas": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield SchemaRegistryClient({"url": f"http://127.0.0.1:{server.server_port}"})
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("kind", ["avro", "json"])
def test_serialized_records_are_committed_and_read_back(
    site: Site,
    client: rollbridge.Bridge,
    scope: str,
    registry: SchemaRegistryClient,
    unique_name: Callable[[str], str],
    kind: str,
) -> None:
    topic = unique_name("orders")
    KafkaClient(site.cluster.bootstrap_servers).topics.create_topics([TopicSpec(name=topic, partitions=2)])
    client.admin.adopt_topic(topic, stream=f"{scope}/{topic}")
    serialize: Any = AvroSerializer(registry, AVRO) if kind == "avro" else JSONSerializer(JSON, registry)
    deserialize: Any = AvroDeserializer(registry) if kind == "avro" else JSONDeserializer(JSON)
    context = SerializationContext(topic, MessageField.VALUE)
    settings = {
        "bootstrap.servers": site.cluster.bootstrap_servers,
        "zookeeper": site.cluster.zookeeper,
        "zookeeper.root": site.root,
    }
    with client.transaction(topic) as txn:
        txn.write(topic, b"order-7", serialize(ORDER, context))
    consumer = rollbridge.Consumer({**settings, "group.id": topic, "auto.offset.reset": "earliest"})
    try:
        consumer.subscribe([topic])
        message = consumer.poll(PATIENCE_S)
        assert message is not None
        assert message.error() is None
        assert deserialize(message.value(), context) == ORDER
        assert (message.topic(), message.key()) == (topic, b"order-7")
    finally:
        consumer.close()
