"""The transactional parts of other projects' own test suites, at a broker and at a gateway.

What they expect beside that, such as topics that make themselves, is theirs and the broker's business.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import rollbridge
from integration_tests.clients import Site, adopt
from integration_tests.foreign.suites import kafka_python
from integration_tests.gateways import GatewayProcess
from integration_tests.kafka_tools import create_topic

KNOWN: dict[str, str] = {}
"""What a gateway answers otherwise: the test, and what becomes of it there."""


@pytest.mark.long
def test_kafka_python_finds_at_a_gateway_what_it_finds_at_a_broker(
    site: Site, client: rollbridge.Bridge, gateway: GatewayProcess, tmp_path: Path
) -> None:
    topic = "transactional_test_topic"  # as its tests call it
    create_topic(site.cluster.bootstrap_servers, topic, 2)
    at_broker = kafka_python(site.cluster.bootstrap_servers, "4.2", "transactional", tmp_path / "broker.xml")
    assert set(at_broker.values()) == {"passed"}
    adopt(client, topic)
    at_gateway = kafka_python(gateway.address, "4.2", "transactional", tmp_path / "gateway.xml")
    assert {name: said for name, said in at_gateway.items() if said != "passed"} == KNOWN
    assert at_gateway.keys() == at_broker.keys()
