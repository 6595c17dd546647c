"""A gateway on a cluster that trusts nobody: clients can do what their own ACLs allow, and no more than that.

Alice may write to ``sales/orders`` and to the adopted topic ``shop``, under transactional ids that begin with
``alice-``; bob has transactional ids of his own and may write to nothing; carol may read nothing. The gateway has the
rights that ``rollbridge access`` prints and grants for it, so these are enough.
"""

from __future__ import annotations

import base64
import json
import secrets
import socket
import ssl
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Self

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from kio.schema.errors import ErrorCode

from integration_tests.backends.choice import Backend
from integration_tests.clients import read_committed
from integration_tests.command_line import run_cli
from integration_tests.foreign.java import JavaProducer
from integration_tests.gateways import GatewayProcess, Servers, client_of
from integration_tests.kafka_tools import create_topic
from integration_tests.patience import eventually
from integration_tests.secured import (
    CA,
    CERTIFICATE,
    CERTIFICATES,
    Secured,
    kafka_security,
    password,
    secured_cluster,
    zookeeper_security,
)
from rollbridge.base.security import Security
from rollbridge.config import ConnectionSettings
from rollbridge.errors import AuthenticationError, RollbridgeError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.records import BatchBuilder, stamp
from rollbridge.metadata import paths
from rollbridge.metadata.access import Resource, Right, coordinator
from rollbridge.metadata.access import gateway as rights_of_a_gateway
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.names import GroupName, StreamName
from rollbridge_gateway.protocol import wire
from rollbridge_gateway.protocol.versions import Api
from rollbridge_gateway.server.relay import BrokerWatch

ORDERS, SHOP = StreamName.parse("sales/orders"), StreamName.parse("sales/shop")
GROUP = GroupName("sales")
VIRTUAL, ADOPTED, SOURCE, HIDDEN = "sales.orders", "shop", "source", "hidden"
BUFFERS = ORDERS.buffer_topic(), SHOP.internal_buffer_topic()
GATEWAY = "gateway-1"
USERS = ("coordinator", "gateway", "alice", "bob", "carol")
SECRET = "Hush-"
WRITES = Right(Resource.TOPIC, ADOPTED, ("Write",), "")
MAY_ALICE = (
    WRITES,
    Right(Resource.TOPIC, f"{VIRTUAL}.", ("Read", "Write"), "", prefixed=True),
    Right(Resource.TOPIC, SOURCE, ("Read",), ""),
    Right(Resource.TOPIC, HIDDEN, ("Write",), ""),
    Right(Resource.TRANSACTIONAL_ID, "alice-", ("Write",), "", prefixed=True),
    Right(Resource.GROUP, "billing", ("Read",), ""),
    Right(Resource.GROUP, "of-alice", ("Read",), ""),
)
MAY_BOB = (
    Right(Resource.TRANSACTIONAL_ID, "bob-", ("Write",), "", prefixed=True),
    Right(Resource.GROUP, "bobs", ("Read",), ""),
    Right(Resource.TOPIC, ADOPTED, ("Describe",), ""),
)
MAY_CAROL = (Right(Resource.GROUP, "of-carol", ("Read",), ""),)
CERTIFICATE_OF_SERVER: Final = f"--certificate={CERTIFICATES / 'server.pem'}"
PLAIN: Final = "org.apache.kafka.common.security.plain.PlainLoginModule required"
BEARER: Final = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required"


def bearer_token(user: str, seconds: float = 3600) -> str:
    """A token that Kafka's validator for tests takes: nobody has signed it (an unsecured JWS, RFC 7515)."""
    now_s = time.time()
    parts = {"alg": "none"}, {"sub": user, "iat": now_s - 1, "exp": now_s + seconds}
    return "".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") + "." for part in parts)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    listener = "listener.name.scram"
    known = " ".join(f'user_{user}="{password(user)}"' for user in USERS)
    settings = {
        f"{listener}.sasl.enabled.mechanisms": "SCRAM-SHA-256,PLAIN,OAUTHBEARER",
        f"{listener}.oauthbearer.sasl.jaas.config": f"{BEARER};",
        f"{listener}.oauthbearer.connections.max.reauth.ms": "3600000",
        f"{listener}.plain.sasl.jaas.config": f"{PLAIN} {known};",
    }
    with ExitStack() as stack:
        directory = tmp_path_factory.mktemp("secured")
        cluster = stack.enter_context(secured_cluster(Backend.LOCAL, directory, settings))
        cluster.add_users(*USERS)
        cluster.allow("coordinator", coordinator("sales", ["billing"], ADOPTED))
        cluster.allow("coordinator", [Right(Resource.TOPIC, SOURCE, ("Read",), "")])
        cluster.allow("gateway", rights_of_a_gateway(ORDERS, GROUP))
        cluster.allow("gateway", rights_of_a_gateway(SHOP, GROUP, ADOPTED))
        cluster.allow("alice", MAY_ALICE)
        cluster.allow("bob", MAY_BOB)
        cluster.allow("carol", MAY_CAROL)
        stack.enter_context(cluster.coordinator("coordinator"))
        with opened(cluster) as session:
            eventually(lambda: session.children(paths.COORDINATORS), "a coordinator")
        for topic in (ADOPTED, SOURCE, HIDDEN):
            create_topic(cluster.inner, topic)
        with cluster.connect("coordinator") as client:
            client.admin.create_stream(str(ORDERS), segments=2)
            client.admin.adopt_topic(ADOPTED, stream=str(SHOP))
        made = run_cli(
            cluster.environment("gateway"), "access", "identity", "gateway", stdin=password("gateway").encode()
        )
        for what in ("gateways", str(GROUP)):
            done = run_cli(cluster.environment("coordinator"), "access", "grant", what, made.out.strip())
            assert done.code == 0, done
        yield cluster


@pytest.fixture(scope="module")
def gateway(secured: Secured, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway with TLS, which tells everything and remembers rights for a second."""
    servers = Servers(secured.bootstrap_servers, secured.zookeeper, secured.root)
    arguments = [CERTIFICATE_OF_SERVER, "--log-level=DEBUG", "--rights-seconds=1"]
    environment = secured.environment("gateway")
    with GatewayProcess(servers, GATEWAY, tmp_path_factory.mktemp("gateways"), arguments, environment) as process:
        yield process


def opened(cluster: Secured) -> ZooKeeperSession:
    return ZooKeeperSession(cluster.zookeeper, root=cluster.root, security=zookeeper_security("coordinator"))


def client(gateway: GatewayProcess, user: str, mechanism: str = "SCRAM-SHA-256", **more: object) -> dict[str, object]:
    """librdkafka's settings of a user."""
    security = {**kafka_security(user), "sasl.mechanism": mechanism}
    return {"bootstrap.servers": gateway.address, "socket.timeout.ms": 60_000, **security, **more}


class Raw:
    """A connection to a gateway, whose requests are what a test says."""

    def __init__(self, address: str, user: str | None, mechanism: str = "SCRAM-SHA-256", secret: str = "") -> None:
        """Connect; authenticate if there is a user."""
        host, _, port = address.partition(":")
        plain = socket.create_connection((host, int(port)), 60)
        self._socket = ssl.create_default_context(cafile=CA).wrap_socket(plain, server_hostname=host)
        if user is not None:
            settings = {**kafka_security(user), "sasl.mechanism": mechanism}
            settings["sasl.password"] = secret or settings["sasl.password"]
            try:
                self.ask(Api.SASL_HANDSHAKE, 1, {"mechanism": mechanism})
                Security.from_config(settings).authenticate(self.token)
            except BaseException:
                self._socket.close()
                raise

    def token(self, data: bytes) -> bytes:
        """Exchange a token of SASL."""
        answer = self.ask(Api.SASL_AUTHENTICATE, 1, {"auth_bytes": data})
        if answer is None:
            raise AuthenticationError("closed")
        if answer.error_code is not ErrorCode.none:
            raise AuthenticationError(f"{answer.error_code.name}: {answer.error_message}")
        return bytes(answer.auth_bytes)

    def bearer(self, user: str, seconds: float = 3600) -> None:
        """Authenticate by a token, for the first time or again."""

        def is_begun() -> bool:
            answer = self.ask(Api.SASL_HANDSHAKE, 1, {"mechanism": "OAUTHBEARER"})
            return answer is None or answer.error_code is ErrorCode.none

        eventually(is_begun, "a broker takes one login a second")
        if error := self.token(f"n,,\1auth=Bearer {bearer_token(user, seconds)}\1\1".encode()):
            raise AuthenticationError(error.decode())

    def ask(self, key: int, version: int, values: Mapping[str, Any]) -> Any:
        """Send a request, and return its answer; None if the connection is closed instead."""
        return self.exchange(wire.framed(wire.write_request(key, version, 7, "raw", values)), key, version)

    def exchange(self, data: bytes, key: int, version: int) -> Any:
        """The same with bytes."""
        try:
            self._socket.sendall(data)
            size = int.from_bytes(self._read(4), "big")
            return wire.read_answer(self._read(size), key, version)
        except (ConnectionError, ssl.SSLError):
            return None

    def _read(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            fresh = self._socket.recv(size - len(found))
            if not fresh:
                raise ConnectionError("closed")
            found += fresh
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    # Requests of a transactional producer

    def start(self, transactional_id: str) -> Any:
        """InitProducerId."""
        values = {"transactional_id": transactional_id, "transaction_timeout": timedelta(hours=1)}
        return self.ask(Api.INIT_PRODUCER_ID, 2, values)

    def produce(self, transactional_id: str, pair: Any, topic: str, value: bytes, sequence: int = 0) -> ErrorCode:
        """A record, with transactions v2."""
        builder = BatchBuilder(1_000)
        builder.append(0, b"k", value)
        batch = stamp(
            builder.build(),
            producer_id=int(pair.producer_id),
            producer_epoch=int(pair.producer_epoch),
            base_sequence=sequence,
        )
        values = {
            "transactional_id": transactional_id,
            "acks": -1,
            "topic_data": [{"name": topic, "partition_data": [{"index": 0, "records": batch}]}],
        }
        code: ErrorCode = self.ask(Api.PRODUCE, 12, values).responses[0].partition_responses[0].error_code
        return code

    def commit(self, transactional_id: str, pair: Any, *, committed: bool = True) -> Any:
        """EndTxn."""
        values = {"transactional_id": transactional_id, **pair_of(pair), "committed": committed}
        return self.ask(Api.END_TXN, 5, values)

    def abort(self, transactional_id: str, pair: Any) -> ErrorCode:
        return ErrorCode(self.commit(transactional_id, pair, committed=False).error_code)

    def add(self, transactional_id: str, pair: Any, topic: str) -> ErrorCode:
        """AddPartitionsToTxn."""
        values = {
            "v3_and_below_transactional_id": transactional_id,
            "v3_and_below_producer_id": pair.producer_id,
            "v3_and_below_producer_epoch": pair.producer_epoch,
            "v3_and_below_topics": [{"name": topic, "partitions": [0]}],
        }
        answer = self.ask(Api.ADD_PARTITIONS_TO_TXN, 3, values)
        code: ErrorCode = answer.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code
        return code

    def add_offsets(self, transactional_id: str, pair: Any, group: str) -> ErrorCode:
        """AddOffsetsToTxn."""
        values = {"transactional_id": transactional_id, **pair_of(pair), "group_id": group}
        code: ErrorCode = self.ask(Api.ADD_OFFSETS_TO_TXN, 3, values).error_code
        return code

    def send_offsets(self, transactional_id: str, pair: Any, group: str, *topics: str) -> dict[str, ErrorCode]:
        """TxnOffsetCommit of version 5."""
        offset = {"partition_index": 0, "committed_offset": 0, "committed_metadata": ""}
        values = {
            "transactional_id": transactional_id,
            "group_id": group,
            **pair_of(pair),
            "topics": [{"name": topic, "partitions": [offset]} for topic in topics],
        }
        answer = self.ask(Api.TXN_OFFSET_COMMIT, 5, values)
        return {str(topic.name): topic.partitions[0].error_code for topic in answer.topics}


def pair_of(answer: Any) -> dict[str, int]:
    return {"producer_id": answer.producer_id, "producer_epoch": answer.producer_epoch}


def ends(cluster: Secured) -> dict[Any, Any]:
    """Where the buffers end."""
    return dict(KafkaClient(cluster.inner).offsets.end(BUFFERS))


def written(cluster: Secured) -> list[bytes | None]:
    """Values of the adopted topic."""
    return [message.value() for message in read_committed(cluster.inner, [ADOPTED])]


def fresh_id(user: str) -> str:
    return f"{user}-{secrets.token_hex(4)}"


# -- who gets in ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "PLAIN"])
def test_who_may_writes_through_tls_and_sasl(secured: Secured, gateway: GatewayProcess, mechanism: str) -> None:
    producer = Producer(client(gateway, "alice", mechanism, **{"transactional.id": fresh_id("alice")}))
    producer.init_transactions(120)
    producer.begin_transaction()
    value = f"by {mechanism}".encode()
    for topic in (ADOPTED, VIRTUAL):
        producer.produce(topic, key=b"k", value=value)
    assert producer.flush(120) == 0
    assert value not in written(secured)
    producer.commit_transaction(120)
    assert written(secured).count(value) == 1
    segments = [f"{VIRTUAL}.segment-{number}.epoch-0" for number in range(2)]
    assert [message.value() for message in read_committed(secured.inner, segments)].count(value) == 1


def test_a_producer_in_java_writes_likewise(secured: Secured, gateway: GatewayProcess, tmp_path: Path) -> None:
    module = "org.apache.kafka.common.security.scram.ScramLoginModule"
    settings = {
        "security.protocol": "SASL_SSL",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": CA,
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.jaas.config": f'{module} required username="alice" password="{password("alice")}";',
    }
    before = len(written(secured))
    with JavaProducer(gateway.address, fresh_id("alice"), tmp_path / "java.log", settings=settings) as java:
        java.do("init")
        java.do("begin")
        java.write(ADOPTED, 0, 10)
        java.do("commit")
    assert len(written(secured)) == before + 10


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "PLAIN"])
def test_a_wrong_password_is_refused_in_the_brokers_words(
    secured: Secured, gateway: GatewayProcess, mechanism: str
) -> None:
    said = []
    for address in (secured.bootstrap_servers, gateway.address):
        with pytest.raises(AuthenticationError) as refused:
            Raw(address, "alice", mechanism, "wrong")
        said.append(str(refused.value))
    assert said[0] == said[1]
    assert "sasl_authentication_failed" in said[0]
    faults: list[KafkaError] = []
    settings = {**client(gateway, "alice", mechanism), "sasl.password": "wrong", "error_cb": faults.append}
    producer = Producer(settings)
    eventually(lambda: producer.poll(0.01) or faults, "librdkafka says what is wrong")
    assert KafkaError._AUTHENTICATION in [fault.code() for fault in faults]
    with Raw(gateway.address, "alice", mechanism) as right:
        assert right.start(fresh_id("alice")).error_code is ErrorCode.none


def test_nothing_is_answered_before_the_client_has_authenticated_itself(gateway: GatewayProcess) -> None:
    requests: list[tuple[int, int, Mapping[str, Any]]] = [
        (Api.METADATA, 12, {"topics": ()}),
        (Api.FIND_COORDINATOR, 4, {"key_type": 1, "coordinator_keys": ["alice-1"]}),
        (Api.INIT_PRODUCER_ID, 2, {"transactional_id": "alice-1", "transaction_timeout": timedelta(hours=1)}),
        (Api.DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": ["alice-1"]}),
        (Api.LIST_TRANSACTIONS, 0, {}),
        (Api.FETCH, 4, {}),
    ]
    for key, version, values in requests:
        with Raw(gateway.address, None) as raw:
            assert raw.ask(Api.API_VERSIONS, 0, {}).error_code is ErrorCode.none
            assert raw.ask(key, version, values) is None
    for key, version, values in requests:  # the broker has taken the first token of two, and that is all
        with Raw(gateway.address, None) as raw:
            raw.ask(Api.SASL_HANDSHAKE, 1, {"mechanism": "SCRAM-SHA-256"})
            assert raw.token(b"n,,n=alice,r=abcdefghijklmnopqrstuvwx").startswith(b"r=abc")
            assert raw.ask(key, version, values) is None
    with Raw(gateway.address, None) as raw:
        assert raw.ask(Api.SASL_HANDSHAKE, 0, {"mechanism": "PLAIN"}) is None
    with Raw(gateway.address, None) as raw:  # announced bytes take room, which is not for strangers
        assert raw.exchange((1 << 20).to_bytes(4, "big"), Api.METADATA, 12) is None


def test_a_client_that_does_not_authenticate_itself_is_closed(secured: Secured, tmp_path: Path) -> None:
    servers = Servers(secured.bootstrap_servers, secured.zookeeper, secured.root)
    environment = {**secured.environment("gateway"), "CONSTANT_FIRST_S": "1", "CONSTANT_REQUEST_S": "1"}
    with (
        GatewayProcess(servers, "gateway-strict", tmp_path, [CERTIFICATE_OF_SERVER], environment) as strict,
        Raw(strict.address, None) as raw,
    ):
        asked = 0
        while raw.ask(Api.API_VERSIONS, 0, {}) is not None:  # whatever it does meanwhile
            asked += 1
        assert asked


def test_plain_text_at_a_port_with_tls_closes_its_connection_only(gateway: GatewayProcess) -> None:
    with Raw(gateway.address, "alice") as before:
        for data in (wire.framed(wire.write_request(Api.API_VERSIONS, 0, 1, None, {})), b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", gateway.port), 60) as plain:
                plain.sendall(data)
                answer = plain.recv(1_000)
                assert answer == b"" or answer[0] == 21, "a TLS alert at most"
        assert before.start(fresh_id("alice")).error_code is ErrorCode.none


def test_tls_at_a_plain_port_closes_its_connection_only(
    secured: Secured, gateway: GatewayProcess, tmp_path: Path
) -> None:
    servers = Servers(secured.bootstrap_servers, secured.zookeeper, secured.root)
    with GatewayProcess(servers, "gateway-plain", tmp_path, environment=secured.environment("gateway")) as plain:
        for _ in range(2):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                Raw(plain.address, "alice")


@pytest.fixture(scope="module")
def forgetful(secured: Secured, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway with TLS that remembers rights for longer than any test takes."""
    servers = Servers(secured.bootstrap_servers, secured.zookeeper, secured.root)
    arguments = [CERTIFICATE_OF_SERVER, "--log-level=DEBUG", "--rights-seconds=100000"]
    environment, logs = secured.environment("gateway"), tmp_path_factory.mktemp("gateways")
    with GatewayProcess(servers, "gateway-remembers", logs, arguments, environment) as process:
        yield process


def test_a_session_that_is_over_is_closed_unless_its_client_authenticates_itself_again(
    secured: Secured, forgetful: GatewayProcess
) -> None:
    mine = fresh_id("alice")
    with Raw(forgetful.address, None) as short, Raw(forgetful.address, None) as long:
        short.bearer("alice", 5)
        long.bearer("alice", 5)
        long.bearer("alice")
        eventually(lambda: short.start(mine) is None, "the session is over")
        assert long.start(mine).error_code is ErrorCode.none


def test_who_authenticates_itself_again_has_its_rights_looked_up_anew(
    secured: Secured, forgetful: GatewayProcess
) -> None:
    mine = fresh_id("alice")
    with Raw(forgetful.address, None) as alice:
        alice.bearer("alice")
        pair = alice.start(mine)
        assert alice.produce(mine, pair, ADOPTED, mine.encode(), 0) is ErrorCode.none
        alice.bearer("alice")
        assert alice.produce(mine, pair, ADOPTED, mine.encode(), 1) is ErrorCode.none
        with secured.denied("alice", WRITES):
            assert alice.produce(mine, pair, ADOPTED, mine.encode(), 2) is ErrorCode.none, "it is remembered"

            def is_refused() -> bool:
                alice.bearer("alice")
                return alice.produce(mine, pair, ADOPTED, b"no", 3) is ErrorCode.topic_authorization_failed

            eventually(is_refused, "what was remembered is forgotten")
        alice.bearer("alice")
        eventually(lambda: alice.commit(mine, pair).error_code is ErrorCode.none, "it ends")
    assert b"no" not in written(secured)


@pytest.mark.parametrize("how", ["another one", "expired", "silence"])
def test_nobody_takes_a_connection_over_with_its_rights(secured: Secured, forgetful: GatewayProcess, how: str) -> None:
    mine = fresh_id("alice")
    with Raw(forgetful.address, None) as raw:
        raw.bearer("alice")
        pair = raw.start(mine)
        assert raw.produce(mine, pair, ADOPTED, mine.encode(), 0) is ErrorCode.none
        before = ends(secured)
        if how == "silence":
            assert raw.ask(Api.SASL_HANDSHAKE, 1, {"mechanism": "OAUTHBEARER"}) is not None
        else:
            with pytest.raises(AuthenticationError):
                raw.bearer("bob") if how == "another one" else raw.bearer("alice", -10)
        assert raw.start(mine) is None
        assert ends(secured) == before


def test_what_is_under_way_is_answered_before_a_login_begins_again(secured: Secured, forgetful: GatewayProcess) -> None:
    """Its rights are asked for on the connection to the broker, which takes nothing else in the middle of a login."""
    count, is_taken = 5, False
    while not is_taken:  # a broker takes a login a second at most: then more has to be under way
        count *= 2
        with Raw(forgetful.address, None) as raw:
            raw.bearer("alice")
            ids = [fresh_id("alice") for _ in range(count)]
            values = [{"transactional_id": name, "transaction_timeout": timedelta(hours=1)} for name in ids]
            several = [wire.framed(wire.write_request(Api.INIT_PRODUCER_ID, 2, 7, "raw", item)) for item in values]
            handshake = wire.framed(wire.write_request(Api.SASL_HANDSHAKE, 1, 7, "raw", {"mechanism": "OAUTHBEARER"}))
            answers = [raw.exchange(b"".join([*several, handshake]), Api.INIT_PRODUCER_ID, 2)]
            answers += [raw.exchange(b"", Api.INIT_PRODUCER_ID, 2) for _ in ids[1:]]
            assert {item.error_code for item in answers} == {ErrorCode.none}
            is_taken = raw.exchange(b"", Api.SASL_HANDSHAKE, 1).error_code is ErrorCode.none
            if is_taken:
                assert raw.token(f"n,,\1auth=Bearer {bearer_token('alice')}\1\1".encode()) == b""
                assert raw.start(ids[0]).error_code is ErrorCode.none


def test_librdkafka_goes_on_over_several_sessions(secured: Secured, forgetful: GatewayProcess) -> None:
    def token(_: str) -> tuple[str, float]:
        return bearer_token("alice", 10), time.time() + 10

    settings = {key: value for key, value in client(forgetful, "alice", "OAUTHBEARER").items() if "sasl." not in key}
    # Another gateway of the cluster, which other tests use, has every second client.
    settings["client.id"] = client_of([forgetful.name], [GATEWAY])
    mine, again, rounds = fresh_id("alice"), "login.again", 0
    before = forgetful.log.read_text(errors="replace").count(again)
    producer = Producer({**settings, "sasl.mechanism": "OAUTHBEARER", "oauth_cb": token, "transactional.id": mine})
    producer.poll(1)
    producer.init_transactions(120)

    def has_lasted() -> bool:
        nonlocal rounds
        producer.begin_transaction()
        producer.produce(ADOPTED, f"{mine}-{rounds}")
        producer.commit_transaction(120)
        producer.poll(0)
        rounds += 1
        return forgetful.log.read_text(errors="replace").count(again) >= before + 3

    eventually(has_lasted, "three sessions more")
    found = Counter(value for value in written(secured) if value and value.startswith(f"{mine}-".encode()))
    assert found == Counter(f"{mine}-{number}".encode() for number in range(rounds))


# -- what they may do -----------------------------------------------------------------------------------------


def test_a_topic_needs_a_right_of_the_clients_own(secured: Secured, gateway: GatewayProcess) -> None:
    with Raw(gateway.address, "bob") as bob, Raw(gateway.address, "alice") as alice:
        his, hers = fresh_id("bob"), fresh_id("alice")
        pair, other = bob.start(his), alice.start(hers)
        assert pair.error_code is other.error_code is ErrorCode.none
        assert alice.produce(hers, other, ADOPTED, b"alice may") is ErrorCode.none
        assert alice.produce(hers, other, VIRTUAL, b"alice may") is ErrorCode.none
        before = ends(secured)
        for topic in (ADOPTED, VIRTUAL):
            assert bob.produce(his, pair, topic, b"bob may not") is ErrorCode.topic_authorization_failed
            assert bob.add(his, pair, topic) is ErrorCode.topic_authorization_failed
        assert bob.send_offsets(his, pair, "bobs", ADOPTED) == {ADOPTED: ErrorCode.topic_authorization_failed}
        assert bob.add_offsets(his, pair, "bobs") is not ErrorCode.none, "no stream is his to begin it in"
        assert ends(secured) == before
        assert alice.commit(hers, other).error_code is ErrorCode.none
    assert written(secured).count(b"alice may") == 1
    assert b"bob may not" not in written(secured)


def test_a_transactional_id_of_somebody_else_is_out_of_reach(secured: Secured, gateway: GatewayProcess) -> None:
    denied = ErrorCode.transactional_id_authorization_failed
    with Raw(gateway.address, "alice") as alice, Raw(gateway.address, "bob") as bob:
        hers = fresh_id("alice")
        pair = alice.start(hers)
        assert alice.produce(hers, pair, ADOPTED, hers.encode()) is ErrorCode.none
        assert alice.produce(hers, pair, VIRTUAL, hers.encode()) is ErrorCode.none
        before = ends(secured)
        assert bob.start(hers).error_code is denied
        assert bob.produce(hers, pair, ADOPTED, b"bob's") is denied
        assert bob.add(hers, pair, ADOPTED) is denied
        assert bob.add_offsets(hers, pair, "bobs") is denied
        assert set(bob.send_offsets(hers, pair, "bobs", ADOPTED).values()) == {denied}
        assert bob.commit(hers, pair).error_code is denied
        assert ends(secured) == before
        (told,) = bob.ask(Api.DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": [hers]}).transaction_states
        assert (told.error_code, told.transaction_state, told.topics) == (denied, "", ())
        assert told.producer_id in (0, -1)
        # Which transactions are open is on record half a second after they began.
        eventually(lambda: hers in listed(gateway, "alice"), "alice's transaction is listed")
        assert listed(gateway, "bob") == set()
        eventually(lambda: pair.producer_id in told_producers(alice, VIRTUAL), "the stream that joined late as well")
        (known,) = alice.ask(Api.DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": [hers]}).transaction_states
        assert (known.transaction_state, {str(item.topic) for item in known.topics}) == ("Ongoing", {ADOPTED, VIRTUAL})
        assert told_producers(alice, ADOPTED) == ErrorCode.topic_authorization_failed, "to write is not to read"
        assert told_producers(bob, ADOPTED) == told_producers(bob, VIRTUAL) == ErrorCode.topic_authorization_failed
        assert alice.commit(hers, pair).error_code is ErrorCode.none
    assert written(secured).count(hers.encode()) == 1


def listed(gateway: GatewayProcess, user: str) -> set[str]:
    """Transactional ids that ListTransactions tells of, at the broker's port."""
    with Raw(gateway.address, user) as raw:
        brokers = raw.ask(Api.METADATA, 9, {"topics": ()}).brokers
    found: set[str] = set()
    for broker in brokers:
        with Raw(f"{broker.host}:{broker.port}", user) as raw:
            found |= {str(item.transactional_id) for item in raw.ask(Api.LIST_TRANSACTIONS, 0, {}).transaction_states}
    return found


def told_producers(raw: Raw, topic: str) -> Any:
    """Producer ids that DescribeProducers tells of, or its error."""
    answer = raw.ask(Api.DESCRIBE_PRODUCERS, 0, {"topics": [{"name": topic, "partition_indexes": [0]}]})
    (part,) = answer.topics[0].partitions
    if part.error_code is not ErrorCode.none:
        assert part.active_producers == ()
        return part.error_code
    return [int(item.producer_id) for item in part.active_producers]


def test_offsets_need_rights_on_the_group_and_on_their_topics(secured: Secured, gateway: GatewayProcess) -> None:
    with Raw(gateway.address, "alice") as alice:
        mine = fresh_id("alice")
        pair = alice.start(mine)
        assert alice.produce(mine, pair, ADOPTED, b"with offsets") is ErrorCode.none
        refused = ErrorCode.group_authorization_failed
        assert alice.add_offsets(mine, pair, "bobs") is refused
        assert alice.send_offsets(mine, pair, "bobs", SOURCE) == {SOURCE: refused}
        assert alice.send_offsets(mine, pair, "billing", SOURCE, HIDDEN) == {
            SOURCE: ErrorCode.none,
            HIDDEN: ErrorCode.topic_authorization_failed,
        }
        assert alice.commit(mine, pair).error_code is ErrorCode.none


def test_a_right_that_is_revoked_ends(secured: Secured, gateway: GatewayProcess) -> None:
    with Raw(gateway.address, "alice") as alice:
        mine, sequence = fresh_id("alice"), iter(range(1_000_000))
        pair = alice.start(mine)

        def writes() -> ErrorCode:
            return alice.produce(mine, pair, ADOPTED, b"while she may", next(sequence))

        assert writes() is ErrorCode.none
        with secured.denied("alice", WRITES):
            eventually(lambda: writes() is ErrorCode.topic_authorization_failed, "the right is gone")
            before = ends(secured)
            assert writes() is ErrorCode.topic_authorization_failed
            assert ends(secured) == before
        with secured.denied("alice", Right(Resource.TRANSACTIONAL_ID, mine, ("Write",), "")):
            gone = ErrorCode.transactional_id_authorization_failed
            eventually(lambda: alice.commit(mine, pair).error_code is gone, "the id is not hers any more")


def test_an_abort_that_the_gateway_may_not_write_is_sent_again(secured: Secured, gateway: GatewayProcess) -> None:
    """Else the producer would be told that it is under way until the lease of its transaction ends."""
    with Raw(gateway.address, "alice") as alice:
        mine = fresh_id("alice")
        pair = alice.start(mine)
        assert alice.produce(mine, pair, ADOPTED, b"aborted", 0) is ErrorCode.none
        with secured.denied("gateway", Right(Resource.TOPIC, BUFFERS[1], ("Write",), "")):
            assert alice.abort(mine, pair) is ErrorCode.concurrent_transactions
        eventually(lambda: alice.abort(mine, pair) is ErrorCode.none, "the gateway aborts it, now that it may")
        assert b"aborted" not in written(secured)


def test_what_is_relayed_goes_under_the_clients_own_name(secured: Secured, gateway: GatewayProcess) -> None:
    source = Producer({"bootstrap.servers": secured.inner})
    source.produce(SOURCE, b"for alice")
    assert source.flush(120) == 0
    consumer = Consumer(client(gateway, "alice", **{"group.id": "of-alice", "auto.offset.reset": "earliest"}))
    with closing(consumer):
        consumer.assign([TopicPartition(SOURCE, 0, 0)])
        message = consumer.poll(120)
        assert message is not None
        assert (message.error(), message.value()) == (None, b"for alice")
    place = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 10_000}
    fetch = {"replica_id": -1, "max_bytes": 10_000, "topics": [{"topic": SOURCE, "partitions": [place]}]}
    with Raw(gateway.address, "carol") as carol, Raw(gateway.address, "alice") as alice:
        named = {"topics": [{"name": VIRTUAL}, {"name": SOURCE}], "allow_auto_topic_creation": False}
        denied = ErrorCode.topic_authorization_failed
        for raw, code in ((carol, denied), (alice, ErrorCode.none)):
            (part,) = raw.ask(Api.FETCH, 4, fetch).responses[0].partitions
            assert (part.error_code, bool(part.records)) == (code, raw is alice)
            assert {item.error_code for item in raw.ask(Api.METADATA, 9, named).topics} == {code}
            everything = {str(item.name) for item in raw.ask(Api.METADATA, 0, {"topics": ()}).topics}
            assert (VIRTUAL in everything) is (SOURCE in everything) is (raw is alice)


# -- the gateway itself ---------------------------------------------------------------------------------------


NEEDED: Final = [right for right in rights_of_a_gateway(SHOP, GROUP) if right.resource is Resource.TOPIC]
"""The right to look for a group's coordinator only keeps librdkafka's log quiet."""


@pytest.mark.parametrize("right", NEEDED[:2], ids=["write", "read"])
def test_a_gateway_needs_each_of_its_rights(
    secured: Secured, gateway: GatewayProcess, tmp_path: Path, right: Right
) -> None:
    """A transaction that another gateway has begun does not end well at one that lacks a right, and does with it."""
    mine = fresh_id("alice")
    with Raw(gateway.address, "alice") as alice:
        pair = alice.start(mine)
        assert alice.produce(mine, pair, ADOPTED, mine.encode()) is ErrorCode.none
    servers = Servers(secured.bootstrap_servers, secured.zookeeper, secured.root)
    with secured.denied("gateway", right):
        environment = secured.environment("gateway")
        with (
            GatewayProcess(servers, "gateway-2", tmp_path, [CERTIFICATE_OF_SERVER], environment) as poor,
            Raw(poor.address, "alice") as alice,
        ):
            code = alice.produce(mine, pair, ADOPTED, b"more", 1)
            end = alice.commit(mine, pair).error_code if code is ErrorCode.none else None
            assert end is not ErrorCode.none


def test_no_secret_is_told(secured: Secured, gateway: GatewayProcess) -> None:
    """After all the others: what the gateway has logged at DEBUG, and what stands in ZooKeeper."""
    said = gateway.log.read_text(errors="replace")
    assert "DEBUG" in said
    assert SECRET not in said
    with opened(secured) as session:
        nodes = dict(tree(session, paths.CLUSTER))
    assert any(path.startswith(f"{paths.GATEWAY_IDS}/") for path in nodes)
    assert [path for path, value in nodes.items() if SECRET.encode() in value] == []
    assert {what for what, text in secured.runner.visible().items() if SECRET in text} == set()


def tree(session: ZooKeeperSession, path: str) -> Iterator[tuple[str, bytes]]:
    """All nodes, and what stands in them."""
    node = session.get(path)
    if node is not None:
        yield path, node.value
    for name in session.children(path):
        yield from tree(session, f"{path.rstrip('/')}/{name}")


def test_only_gateways_change_what_gateways_keep(secured: Secured, gateway: GatewayProcess) -> None:
    with Raw(gateway.address, "alice") as alice:
        assert alice.start(fresh_id("alice")).error_code is ErrorCode.none
    with opened(secured) as session:
        entries = [path for path, _ in tree(session, paths.GATEWAYS)]
        assert len(entries) > 5
        for path in entries:
            for entry in session.acl(path):
                assert entry.id.scheme == "digest" or entry.perms == 1, path
    with ZooKeeperSession(secured.zookeeper, root=secured.root, security=zookeeper_security("alice")) as session:
        for path in entries:
            with pytest.raises(RollbridgeError):
                session.set(path, b"")
            with pytest.raises(RollbridgeError):
                session.create(f"{path}/more", b"")


def test_a_client_of_a_cluster_without_sasl_does_not_get_the_gateways_certificate() -> None:
    def has_certificate(protocol: str) -> bool:
        kafka = {**CERTIFICATE, "security.protocol": protocol, "ssl.ca.location": CA}
        if protocol == "SASL_SSL":
            kafka |= {"sasl.mechanism": "PLAIN", "sasl.username": "gateway", "sasl.password": "x"}
        settings = ConnectionSettings(bootstrap_servers="127.0.0.1:1", zookeeper="127.0.0.1:1", kafka=kafka)
        context = BrokerWatch(settings).tls_context()
        assert context is not None
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(CERTIFICATES / "server.pem")
        server.load_verify_locations(CA)
        server.verify_mode = ssl.CERT_OPTIONAL
        ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
        near = context.wrap_bio(theirs, ours, server_hostname="127.0.0.1")
        far = server.wrap_bio(ours, theirs, server_side=True)
        for end in (near, far, near, far):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
        return bool(far.getpeercert())

    assert not has_certificate("SSL")
    assert has_certificate("SASL_SSL")


# -- what operators see ---------------------------------------------------------------------------------------


def findings(cluster: Secured) -> dict[str, str]:
    """What the doctor says of gateways, with a coordinator's credentials."""
    answer = run_cli(cluster.environment("coordinator"), "doctor", "--json")
    assert answer.out, answer
    found = json.loads(answer.out)["findings"]
    said: dict[str, str] = {}
    for item in found:
        if "gateway" in item["check"]:
            said[item["check"]] = f"{said.get(item['check'], '')}{item['what']}; {item['remedy']}\n"
    return said


def state_of(part: str, cluster: Secured) -> str:
    """What ``status`` says of a part of the cluster."""
    parts = json.loads(run_cli(cluster.environment("coordinator"), "status", "--json").out)["parts"]
    return {str(item["part"]): str(item["state"]) for item in parts}[part]


def test_the_doctor_sees_gateways_behind_tls_and_login_and_what_they_lack(
    secured: Secured, gateway: GatewayProcess, tmp_path: Path
) -> None:
    eventually(lambda: findings(secured) == {}, "the gateway is well")
    eventually(lambda: state_of("gateway gateway-1", secured) == "running", "it is said to run")
    servers = Servers(secured.bootstrap_servers, secured.zookeeper, secured.root)
    environment = secured.environment("gateway")
    log = GROUP.commit_log_topic
    with (
        secured.denied("gateway", Right(Resource.TOPIC, BUFFERS[0], ("Write",), "")),
        secured.denied("gateway", Right(Resource.TOPIC, log, ("Read",), "")),
        GatewayProcess(servers, "gateway-2", tmp_path, [CERTIFICATE_OF_SERVER], environment),
    ):
        eventually(lambda: "gateway-rights" in findings(secured), "the doctor finds what it lacks")
        found = findings(secured)
        assert found.keys() == {"gateway-rights"}
        [said] = [line for line in found["gateway-rights"].splitlines() if line.startswith("gateway gateway-2 ")]
        assert f"gateway gateway-2 lacks Write on {BUFFERS[0]}" in said
        assert f"Read on {log}" in said
        assert f"rollbridge access kafka-acls gateway {ORDERS}" in said
    # One that demands a certificate, which this principal has not got, runs all the same.
    demanding = [CERTIFICATE_OF_SERVER, f"--client-ca={CA}"]
    with GatewayProcess(servers, "gateway-3", tmp_path, demanding, environment):
        eventually(lambda: findings(secured).keys() == {"gateway-trust"}, "it does not let the doctor in")
        eventually(lambda: state_of("gateway gateway-3", secured) == "running", "it is said to run")
