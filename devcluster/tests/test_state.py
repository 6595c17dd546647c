"""What an embedded cluster is decided to be: ports, what is kept, and whose directory it may take."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollbridge.errors import InvalidRequestError, LocalEnvironmentError
from rollbridge_devcluster.state import (
    ClusterState,
    Home,
    Ports,
    Wishes,
    decide,
    free_port,
    is_free,
    private_directory,
    refuse_foreign_directory,
)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.path.mkdir()
    return home


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", free_port())) as listener:
        yield listener.getsockname()[1]


def ports_of(state: ClusterState) -> list[int]:
    return [state.ports.kafka, state.ports.kafka_controller, state.ports.zookeeper]


def test_directories_are_closed_to_others_also_those_that_were_there(tmp_path: Path) -> None:
    home = Home(tmp_path / "new" / "home")
    with home.locked(lambda: None):
        assert home.path.stat().st_mode & 0o777 == 0o700
    home.logs.mkdir(mode=0o755)
    assert private_directory(home.logs).stat().st_mode & 0o777 == 0o700


def test_a_new_cluster_gets_three_free_ports_below_those_for_outgoing_connections(home: Home) -> None:
    state = decide(home, None, Wishes(), ())
    assert len(set(ports_of(state))) == 3
    assert all(is_free(port) and port < 32_768 for port in ports_of(state))
    assert (state.coordinators, state.running, state.ephemeral) == (1, True, False)


def test_ports_and_wishes_are_kept(home: Home) -> None:
    first = decide(home, None, Wishes(coordinators=3, kafka_heap="300m", kafka_settings={"a": "b"}), ())
    assert decide(home, first.stopped(), Wishes(), ()) == first
    assert decide(home, first, Wishes(coordinators=0), ()).coordinators == 0


def test_a_port_that_was_taken_meanwhile_is_replaced(home: Home, taken_port: int) -> None:
    first = decide(home, None, Wishes(), ())
    before = replace(first, ports=replace(first.ports, kafka=taken_port))
    now = decide(home, before, Wishes(), ())
    assert now.ports.kafka != taken_port
    assert now.ports.zookeeper == first.ports.zookeeper


def test_a_running_server_keeps_its_port(home: Home, taken_port: int) -> None:
    first = decide(home, None, Wishes(), ())
    before = replace(first, ports=replace(first.ports, kafka=taken_port))
    assert decide(home, before, Wishes(kafka_port=taken_port), ["kafka"]).ports.kafka == taken_port
    with pytest.raises(LocalEnvironmentError, match=f"Kafka runs on port {taken_port} already; .*rollbridge down"):
        decide(home, before, Wishes(kafka_port=free_port()), ["kafka"])


def test_a_port_that_is_asked_for_must_be_free(home: Home, taken_port: int) -> None:
    with pytest.raises(LocalEnvironmentError, match=f"port {taken_port} for ZooKeeper is in use"):
        decide(home, None, Wishes(zookeeper_port=taken_port), ())


def test_a_port_that_is_asked_for_is_given_to_nobody_else(home: Home) -> None:
    first = decide(home, None, Wishes(), ())
    wanted = first.ports.kafka_controller
    now = decide(home, first, Wishes(zookeeper_port=wanted), ())
    assert now.ports.zookeeper == wanted
    assert len(set(ports_of(now))) == 3


def test_a_gateway_has_two_ports_in_a_row_once_it_is_wanted(home: Home) -> None:
    without = decide(home, None, Wishes(), ())
    assert (without.has_gateway, without.gateway_port) == (False, 0)
    first = decide(home, without, Wishes(has_gateway=True), ["kafka", "zookeeper"])
    assert first.ports == without.ports
    assert is_free(first.gateway_port)
    assert is_free(first.gateway_port + 1)
    assert not {first.gateway_port, first.gateway_port + 1} & {*ports_of(first)}
    assert decide(home, first, Wishes(), ()) == first
    gone = decide(home, first, Wishes(has_gateway=False), ())
    assert (gone.has_gateway, gone.gateway_port) == (False, first.gateway_port)
    assert decide(home, gone, Wishes(has_gateway=True), ()) == first, "it has the port that it had"


@pytest.mark.parametrize("behind", [0, 1])
def test_both_ports_of_a_gateway_must_be_free(home: Home, behind: int) -> None:
    port = free_port(count=2)
    with socket.create_server(("127.0.0.1", port + behind)):
        with pytest.raises(LocalEnvironmentError, match=f"port {port + behind} for the gateway is in use"):
            decide(home, None, Wishes(has_gateway=True, gateway_port=port), ())
        first = decide(home, None, Wishes(has_gateway=True), ())
        before = replace(first, gateway_port=port)
        assert decide(home, before, Wishes(), ()).gateway_port != port
        assert decide(home, before, Wishes(), ["gateway"]).gateway_port == port, "one that runs keeps them"


def test_no_server_gets_a_port_of_a_gateway(home: Home) -> None:
    first = decide(home, None, Wishes(), ())
    now = decide(home, first, Wishes(has_gateway=True, gateway_port=first.ports.zookeeper - 1), ["kafka"])
    assert now.gateway_port == first.ports.zookeeper - 1
    assert now.ports.zookeeper != first.ports.zookeeper


def test_a_listener_on_all_addresses_takes_the_port_too() -> None:
    with socket.create_server(("0.0.0.0", free_port())) as listener:
        assert not is_free(listener.getsockname()[1])


@pytest.mark.parametrize("heap", ["", "1", "0g", "1t", "-1g", "1g -Xms1g"])
def test_a_heap_that_java_would_not_take_is_refused(heap: str, home: Home) -> None:
    with pytest.raises(InvalidRequestError, match="not a heap size"):
        decide(home, None, Wishes(kafka_heap=heap), ())


def test_the_cluster_id_of_kafkas_data_outlives_a_lost_state_file(home: Home) -> None:
    (home.of("kafka") / "data").mkdir(parents=True)
    (home.of("kafka") / "data" / "meta.properties").write_text("version=1\ncluster.id=the-stored-id\n")
    assert decide(home, None, Wishes(), ()).kafka_cluster_id == "the-stored-id"


def test_an_ephemeral_cluster_takes_only_an_empty_directory(home: Home, tmp_path: Path) -> None:
    refuse_foreign_directory(Home(tmp_path / "new"), Wishes(ephemeral=True))
    refuse_foreign_directory(home, Wishes(ephemeral=True))
    (home.path / "thesis.tex").write_text("years of work")
    with pytest.raises(LocalEnvironmentError, match="is not empty"):
        refuse_foreign_directory(home, Wishes(ephemeral=True))
    refuse_foreign_directory(home, Wishes())


def test_an_ephemeral_cluster_does_not_take_over_one_whose_data_is_kept(home: Home) -> None:
    home.save(decide(home, None, Wishes(), ()))
    with pytest.raises(LocalEnvironmentError, match="whose data is kept"):
        refuse_foreign_directory(home, Wishes(ephemeral=True))


def test_an_ephemeral_cluster_may_be_brought_up_again(home: Home) -> None:
    home.save(decide(home, None, Wishes(ephemeral=True), ()))
    refuse_foreign_directory(home, Wishes(ephemeral=True))


def test_the_state_file_gives_back_what_was_saved(home: Home) -> None:
    assert home.load() is None
    state = decide(home, None, Wishes(kafka_settings={"log.retention.hours": "1"}, ephemeral=True), ())
    assert home.save(state) == home.load() == state
    assert f'"bootstrap_servers": "127.0.0.1:{state.ports.kafka}"' in home.state_file.read_text()
    assert '"gateway": null' in home.state_file.read_text()
    state = home.save(decide(home, state, Wishes(has_gateway=True), ()))
    assert home.load() == state
    assert f'"gateway": "127.0.0.1:{state.gateway_port}"' in home.state_file.read_text()


def test_a_state_file_of_a_release_without_gateways_is_read(home: Home) -> None:
    state = home.save(decide(home, None, Wishes(), ()))
    document = json.loads(home.state_file.read_text())
    for key in ("gateway", "has_gateway", "gateway_port"):
        del document[key]
    home.state_file.write_text(json.dumps(document))
    assert home.load() == state


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 2}', '{"format": 1}', '{"format": 1, "ports": 3}'])
def test_a_file_that_is_no_state_file_is_named(text: str, home: Home) -> None:
    home.state_file.write_text(text)
    with pytest.raises(LocalEnvironmentError, match=r"cluster\.json is not readable"):
        home.load()


def test_a_new_cluster_has_an_id_as_kafka_writes_them() -> None:
    ids = {
        ClusterState(
            kafka_cluster_id=decide(Home(Path("/none")), None, Wishes(), ()).kafka_cluster_id,
            ports=Ports(kafka=1, kafka_controller=2, zookeeper=3),
            coordinators=0,
        ).kafka_cluster_id
        for _ in range(20)
    }
    assert len(ids) == 20
    assert all(len(text) == 22 and not text.startswith("-") for text in ids)
