"""The transactional parts of other projects' own test suites, at a broker and at a gateway.

What they expect beside that, such as topics that make themselves, is theirs and the broker's business.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import rollbridge
from integration_tests.clients import Site, adopt, stream_of
from integration_tests.foreign.suites import franz_go, kafka_python, sarama
from integration_tests.gateways import GatewayProcess
from integration_tests.kafka_tools import create_topic

_PARTITIONS = 4
KNOWN = {
    # Where a record stands is known after the commit alone, so answers name no offset. The test wants rising ones.
    "TestTxnEtl": "; ".join(
        f"partition {number} produced offsets out of order, got -1 != exp 0" for number in range(_PARTITIONS)
    ),
    # It asks the coordinator alone, whose address is the gateway's: transactions are listed at those of brokers, and
    # only what is open. Sarama's admin client asks all brokers.
    "TestFuncListTransactions": '[]string{} does not contain "TestFuncListTransactions"',
}
"""What a gateway answers otherwise: the test, and what it complains of there."""


def test_kafka_python_finds_at_a_gateway_what_it_finds_at_a_broker(
    site: Site, client: rollbridge.Bridge, gateway: GatewayProcess, tmp_path: Path
) -> None:
    topic = "transactional_test_topic"  # as its tests call it
    create_topic(site.cluster.bootstrap_servers, topic, 2)
    at_broker = kafka_python(site.cluster.bootstrap_servers, "4.2", "transactional", tmp_path / "broker.xml")
    assert set(at_broker.values()) == {"passed"}
    adopt(client, topic)
    at_gateway = kafka_python(gateway.address, "4.2", "transactional", tmp_path / "gateway.xml")
    _compare(at_gateway, at_broker)


def test_franz_go_finds_at_a_gateway_what_it_finds_at_a_broker(
    site: Site, client: rollbridge.Bridge, gateway: GatewayProcess
) -> None:
    """Chains of programs that consume and write in a transaction, while their groups rebalance."""
    settings = {
        "KGO_TEST_RF": "1",
        "KGO_TEST_MAX_TOPIC_PARTS": str(_PARTITIONS),
        "KGO_TEST_RECORDS": "12000",  # the first program commits after 10,000
    }
    at_broker = franz_go(site.cluster.bootstrap_servers, "^TestTxnEtl$", ":", **settings)
    assert set(at_broker.values()) == {"passed"}
    at_gateway = franz_go(gateway.address, "^TestTxnEtl$", _adopt(client), **settings, **site.environment())
    _compare(at_gateway, at_broker)


def test_sarama_finds_at_a_gateway_what_it_finds_at_a_broker(
    site: Site, client: rollbridge.Bridge, gateway: GatewayProcess
) -> None:
    wanted = "^TestFunc(Txn.*(Begin|Messages|Produce|Bump|Offset|Txn)|InitProducerId3|.*(Transactions|Producers))$"
    at_broker = sarama(site.cluster.bootstrap_servers, wanted, ":")
    assert set(at_broker.values()) == {"passed"}
    _compare(sarama(gateway.address, wanted, _adopt(client), **site.environment()), at_broker)


def _adopt(client: rollbridge.Bridge) -> str:
    """The command that adopts a topic, for a shell."""
    stream = stream_of(client, "0").removesuffix("0")
    return f"{sys.executable} -m rollbridge stream adopt $0 --stream {stream}$(echo $0 | tr . -)"


def _compare(at_gateway: Mapping[str, str], at_broker: Mapping[str, str]) -> None:
    """Expect the same tests, and of each what is known of it."""
    assert at_gateway == {name: KNOWN.get(name, said) for name, said in at_broker.items()}
