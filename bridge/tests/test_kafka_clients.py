"""Client settings: what users may set, what they may not, and what is always set; and the library's errors as ours."""

from __future__ import annotations

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer

from rollbridge import errors
from rollbridge.base.security import SECURITY_KEYS, Security
from rollbridge.errors import ConfigError, KafkaUnavailableError, RollbridgeError
from rollbridge.kafka import errors as kafka_errors
from rollbridge.kafka.clients import CONSUMER_KEYS, consumer_config
from rollbridge.kafka.errors import ERROR_CLASSES, kafka_error, translate
from rollbridge.kafka.metadata import Broker, Isolation, parse_bootstrap

SERVERS = "localhost:9092"
SCRAM = {
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "SCRAM-SHA-512",
    "sasl.username": "me",
    "sasl.password": "hunter2",
}


@pytest.mark.parametrize("isolation", Isolation)
def test_consumers_say_what_they_read(isolation: Isolation) -> None:
    config = consumer_config(SERVERS, isolation=isolation, extra={"fetch.wait.max.ms": 7})
    assert config["isolation.level"] == isolation.name.lower()
    assert config["enable.auto.commit"] is False
    assert config["allow.auto.create.topics"] is False
    assert config["check.crcs"] is True
    assert config["fetch.wait.max.ms"] == 7
    Consumer(config).close()


@pytest.mark.parametrize(
    "key",
    ["plugin.library.paths", "enable.idempotence", "transactional.id", "acks", "bootstrap.servers", "sasl.password"],
)
def test_settings_that_change_the_promise_or_load_code_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        consumer_config(SERVERS, isolation=Isolation.READ_COMMITTED, extra={key: "x"})


def test_all_refused_settings_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"acks, group\.id"):
        consumer_config(
            SERVERS, isolation=Isolation.READ_COMMITTED, extra={"group.id": "g", "acks": "1", "fetch.wait.max.ms": 1}
        )


def test_the_library_knows_every_setting_on_the_lists() -> None:
    """One at a time with a wrong value: of a known setting the value is complained of, of an unknown one the name."""
    for key in CONSUMER_KEYS:
        try:
            Consumer({"group.id": "g", key: "no such value"})
        except KafkaException as exc:
            error = kafka_error(exc)
            assert error is not None
            assert "No such configuration property" not in error.str(), key


def test_security_settings_are_those_of_the_library() -> None:
    for key in SECURITY_KEYS:
        try:
            Producer({key: "no such value"})
        except KafkaException as exc:
            error = kafka_error(exc)
            assert error is not None
            assert "No such configuration property" not in error.str(), key
    config = consumer_config(SERVERS, isolation=Isolation.READ_COMMITTED, security=SCRAM)
    assert config["sasl.password"] == "hunter2"


def test_secrets_do_not_show() -> None:
    security = Security.from_config({**SCRAM, "ssl.key.password": "open sesame"})
    assert "hunter2" not in repr(security)
    assert "open sesame" not in repr(security)
    assert (security.uses_tls, security.uses_sasl, security.mechanism) == (True, True, "SCRAM-SHA-512")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"security.protocol": "TLS"}, "security.protocol"),
        ({"security.protocol": "SASL_SSL"}, "sasl.mechanism"),
        ({**SCRAM, "sasl.mechanism": "GSSAPI"}, "GSSAPI"),
        ({"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"}, r"sasl\.username.*sasl\.password"),
        ({"ssl.endpoint.identification.algorithm": "dns"}, "identification"),
        ({"ssl.key.location": "k"}, r"ssl\.certificate\.location"),
        ({"ssl.keystore.password": "hunter2"}, r"ssl\.keystore\.password"),
    ],
)
def test_wrong_security_settings_are_named_without_their_secrets(config: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as wrong:
        Security.from_config(config)
    assert "hunter2" not in str(wrong.value)


def test_files_that_cannot_be_read_are_named() -> None:
    with pytest.raises(ConfigError, match=r"ssl\.ca\.location.*nowhere\.pem"):
        Security.from_config({"security.protocol": "SSL", "ssl.ca.location": "nowhere.pem"}).tls_context()
    with pytest.raises(ConfigError, match=r"ssl\.certificate\.location.*nowhere\.pem"):
        Security.from_config({"security.protocol": "SSL", "ssl.certificate.location": "nowhere.pem"}).tls_context()


def test_brokers_are_listed_with_ports() -> None:
    assert parse_bootstrap("a:1, b:2,[::1]:3") == [Broker("a", 1), Broker("b", 2), Broker("::1", 3)]
    for wrong in ("", "a", "a:", ":1", "a:b", "a:70000", "a:1,b"):
        with pytest.raises(ConfigError, match=r"bootstrap\.servers"):
            parse_bootstrap(wrong)


def _library_codes() -> dict[str, int]:
    names = (name for name in dir(KafkaError) if name.lstrip("_").replace("_", "").isalnum() and name.isupper())
    return {name: getattr(KafkaError, name) for name in names if isinstance(getattr(KafkaError, name), int)}


def test_every_error_code_of_the_library_has_a_class() -> None:
    known = _library_codes()
    assert len(known) > 150
    unmapped = {name for name, code in known.items() if code not in ERROR_CLASSES and code != KafkaError.NO_ERROR}
    assert unmapped == set()


@pytest.mark.parametrize("code", sorted(ERROR_CLASSES))
def test_translated_errors_say_what_was_done_and_what_kafka_said(code: int) -> None:
    error = KafkaError(code, "because")
    ours = translate(error, "create topic t", "topic t")
    assert isinstance(ours, ERROR_CLASSES[code])
    assert "create topic t" in str(ours)
    assert error.name() in str(ours)
    assert type(translate(KafkaException(error), "x")) is type(ours)


@pytest.mark.parametrize(
    ("code", "raised"),
    [
        (KafkaError._ALL_BROKERS_DOWN, errors.KafkaUnavailableError),
        (KafkaError._TIMED_OUT, errors.KafkaUnavailableError),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, errors.NotFoundError),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, kafka_errors.NotAuthorizedError),
        (KafkaError._AUTHENTICATION, kafka_errors.AuthenticationError),
        (KafkaError.TOPIC_ALREADY_EXISTS, errors.ConflictError),
        (KafkaError.PRODUCER_FENCED, errors.FencedError),
        (KafkaError.MSG_SIZE_TOO_LARGE, errors.InvalidRequestError),
        (KafkaError.INVALID_MSG, errors.CorruptDataError),
    ],
)
def test_what_some_codes_mean(code: int, raised: type[RollbridgeError]) -> None:
    assert ERROR_CLASSES[code] is raised


def test_errors_without_a_code_are_translated_too() -> None:
    assert isinstance(translate(ValueError("bad"), "x"), ConfigError)
    assert isinstance(translate(TimeoutError(), "x"), KafkaUnavailableError)
    assert isinstance(translate(RuntimeError("?"), "x"), KafkaUnavailableError)
    denied = translate(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED), "read group g", "group g")
    assert isinstance(denied, kafka_errors.NotAuthorizedError)
    assert denied.resource == "group g"


def test_every_error_of_the_adapter_is_one_of_the_project() -> None:
    for name in kafka_errors.__all__:
        assert issubclass(getattr(kafka_errors, name), RollbridgeError)
