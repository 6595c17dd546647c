"""Alerts on gateways, and on what their clients are told."""

from __future__ import annotations

from typing import Final

from rollbridge.monitoring.alerts import Alert, Remedy, Urgency

GATEWAY_ALERTS: Final = (
    Alert(
        name="NoGateway",
        expression="count by (job) (last_over_time(rollbridge_gateway_info[1d]))\n"
        "  unless on (job) count by (job) (rollbridge_gateway_info)",
        pending="1m",
        urgency=Urgency.CRITICAL,
        summary="No gateway is running ({{ $labels.job }})",
        description="There were gateways within the last day, and none answers Prometheus. Producers in other "
        "languages write nothing, and what they have open waits for them.",
        means="Producers that write through gateways are cut off. Nothing that was acknowledged is lost: "
        "their transactions stay open until their leases end, and go on at whichever gateway comes first.",
        look=(
            (
                "the processes on their machines: do they run, what do their last log lines say? One that is there "
                "and answers nothing hangs, and its ZooKeeper session is over by now"
            ),
            "`rollbridge status` and `rollbridge doctor`: if they know gateways, it is Prometheus that reaches none",
            "`rollbridge txn list`: what producers have open, and for how long it may be",
        ),
        actions=(
            (
                "If a gateway ends right after its start, its last line says why: most often Kafka or ZooKeeper does "
                "not answer, a port is taken, or a certificate cannot be read."
            ),
        ),
        remedies=(
            Remedy(
                "no-gateway",
                "if the process of {name} is still there, it hangs and has its ports: end it with kill -9. Then start "
                "one, at the address that clients know: rollbridge gateway",
            ),
        ),
        avoid="abort the transactions that are open so that producers can go on: they go on by themselves, and a Flink "
        "job loses what its checkpoint had prepared.",
        threshold="A minute outlasts a restart. Installations whose last gateway was taken away on purpose are "
        "forgotten after a day.",
    ),
    Alert(
        name="GatewayDown",
        expression="(up == 0) and on (job, instance) last_over_time(rollbridge_gateway_info[1d])",
        pending="2m",
        urgency=Urgency.WARNING,
        summary="Gateway at {{ $labels.instance }} does not answer",
        description="{{ $labels.instance }} of {{ $labels.job }} was a gateway within the last day, and Prometheus "
        "does not reach it. Others serve the transactional ids that it had, if there are any.",
        means="One gateway has ended, hangs, or its machine or the way to it is gone. Its clients go to others that "
        "they know of; clients that were told of none but this one get nowhere.",
        look=(
            "`rollbridge doctor`: it asks each gateway where clients find it",
            "whether its process runs; the end of its log: one that is asked to end says so",
            "`rollbridge_gateway_connections` of the others: whether its clients have come there",
        ),
        actions=("Start it again, at the same address.",),
        remedies=(
            Remedy(
                "gateway-hangs",
                "end the process of gateway {name} with kill -9, and start it again: others serve its "
                "transactional ids within seconds, and its clients go there",
            ),
            Remedy(
                "gateway-unreachable",
                "if the process of gateway {name} has ended, start it again. If it runs, {host} is not where clients "
                "find it: --advertise says where they do, or a firewall stands before its ports",
            ),
        ),
        avoid="wait for one that hangs: its clients hold connections that nobody serves until they time out.",
        threshold="Two minutes are more than a restart takes, also in a rolling upgrade.",
    ),
    Alert(
        name="GatewayUnhealthy",
        expression="rollbridge_gateway_healthy == 0",
        pending="1m",
        urgency=Urgency.WARNING,
        summary="Gateway at {{ $labels.instance }} does not serve",
        description="{{ $labels.instance }} of {{ $labels.job }} runs, and acknowledges nothing to transactional "
        "producers; /healthz at the same address says why.",
        means="A gateway starts, ends, or could not write its lease in ZooKeeper: as long as another one might serve "
        "the same transactional ids, it acknowledges nothing.",
        look=(
            "`/healthz` of the gateway",
            "`rollbridge_gateway_lease_unwritten_seconds`: whether ZooKeeper answers it",
            "`rollbridge_gateway_loop_lag_seconds`: whether it gets to ask",
        ),
        actions=("Bring ZooKeeper or the network back: it goes on by itself.",),
        avoid="restart it because of ZooKeeper: the new process waits for the same server.",
        threshold="A minute outlasts leases and sessions that time out, and what follows.",
    ),
    Alert(
        name="GatewayCertificateExpires",
        expression="rollbridge_gateway_certificate_expiry_timestamp_seconds - time() < 14 * 86400",
        pending="15m",
        urgency=Urgency.WARNING,
        summary="The certificate of the gateway at {{ $labels.instance }} runs out",
        description="The certificate that {{ $labels.instance }} ({{ $labels.job }}) shows to its clients runs out in "
        "{{ $value | humanizeDuration }}.",
        means="From then on clients refuse to connect to this gateway, and a gateway with it does not start any more.",
        look=("`rollbridge doctor`: `gateway-certificate` names the gateways, and the day",),
        remedies=(
            Remedy(
                "gateway-certificate",
                "renew the file that --certificate of gateway {name} names, and restart it: it reads it at its start",
            ),
        ),
        avoid="switch the encryption off: passwords would cross the network as they are.",
        threshold="Two weeks are time for who renews certificates by hand.",
    ),
    Alert(
        name="GatewaysDisagree",
        expression="""\
max by (job) (rollbridge_gateway_known_gateways) > min by (job) (rollbridge_gateway_known_gateways)
or max by (job) (rollbridge_gateway_known_brokers) > min by (job) (rollbridge_gateway_known_brokers)""",
        pending="5m",
        urgency=Urgency.WARNING,
        summary="Gateways tell their clients different things ({{ $labels.job }})",
        description="Gateways of {{ $labels.job }} know different numbers of gateways, or of brokers that they have a "
        "port for. Clients are sent to and fro.",
        means="Each gateway tells its clients which one they belong to, and each broker's port. Where these differ, "
        "a transactional id changes gateways, and a broker is reached through some of them only.",
        look=(
            "`rollbridge_gateway_known_gateways` and `rollbridge_gateway_known_brokers` by instance",
            "`rollbridge doctor`: `gateway-brokers` names the broker that one has no port for",
            "the log of that gateway: `cannot be listened at`, `the look around failed`",
        ),
        actions=("Restart a gateway that has not heard of the others for minutes: it looks every five seconds.",),
        avoid="name one gateway only in `bootstrap.servers` because of it.",
        threshold="Five minutes outlast a broker that is added, and all gateways of a rolling upgrade but slow ones.",
    ),
    Alert(
        name="GatewayFull",
        expression="rollbridge_gateway_connections / rollbridge_gateway_connections_limit > 0.9\n"
        "or rollbridge_gateway_open_transactions / rollbridge_gateway_transactional_ids_limit > 0.9\n"
        "or rollbridge_gateway_under_way_bytes / rollbridge_gateway_under_way_limit_bytes > 0.9\n"
        "or increase(rollbridge_gateway_refused_connections_total[15m]) > 0",
        pending="5m",
        urgency=Urgency.WARNING,
        summary="Gateway at {{ $labels.instance }} is full",
        description="At {{ $labels.instance }} ({{ $labels.job }}) connections, transactional ids with a transaction "
        "open, or bytes of requests are at nine tenths of their limit, or connections have been refused.",
        means="Further connections are closed at once, further transactional ids are told to ask again, or "
        "connections are not read from.",
        look=(
            "the board's row of gateways: which of the limits it is, and whether other gateways have room",
            "clients that connect anew for each transaction",
            "bytes of requests: brokers that are slow to take what is written",
        ),
        actions=(
            (
                "Add a gateway, and name it in `bootstrap.servers`; or raise `--connections-max` or `--ids-max`, where "
                "the machine has memory for it."
            ),
        ),
        avoid="raise limits on a gateway whose event loop is late already: what waits there waits longer.",
        threshold="A tenth is room enough for the clients of a small gateway that ends.",
    ),
    Alert(
        name="GatewayLate",
        expression="histogram_quantile(0.99, sum by (job, instance, le) "
        "(rate(rollbridge_gateway_loop_lag_seconds_bucket[10m]))) > 0.25",
        pending="10m",
        urgency=Urgency.WARNING,
        summary="Gateway at {{ $labels.instance }} has more to do than it can",
        description="The event loop of {{ $labels.instance }} ({{ $labels.job }}) comes {{ $value | humanizeDuration "
        "}} late to what is due, one time in a hundred. Each request waits as long.",
        means="A gateway is one process with one event loop. It gets less of a processor than it needs.",
        look=(
            "its processor time: at one whole processor it is its clients' work; below, other processes take it",
            "requests by `api`: which kind there is most of",
        ),
        actions=("Add a gateway: clients spread over all of them by their `client.id`.",),
        avoid="give it more processors: it uses one and a little.",
        threshold="A quarter of a second in each request is what clients notice; sessions of ZooKeeper end at 6 s.",
    ),
    Alert(
        name="GatewaySavepointsFail",
        expression="increase(rollbridge_gateway_savepoint_failures_total[15m]) > 5",
        pending="1m",
        urgency=Urgency.WARNING,
        summary="Gateway at {{ $labels.instance }} cannot write for its producers",
        description="{{ $value | humanize }} requests of producers at {{ $labels.instance }} ({{ $labels.job }}) were "
        "not acknowledged within a quarter of an hour, as the brokers did not take what they wrote.",
        means="Producers send the same again, and each record counts once. Until that gets through, they stand still.",
        look=(
            "the gateway's log: what the brokers say, or that they say nothing for 25 s",
            "brokers: partitions of buffers without a leader, or without enough replicas in sync",
            "`rollbridge doctor`: `retention`, `replication`, `quota`, `gateway-rights`",
        ),
        actions=("Mend what the brokers lack. Producers go on by themselves until their `delivery.timeout.ms`.",),
        avoid="restart the gateway: the next one writes to the same brokers.",
        threshold="A broker that restarts costs a few.",
    ),
    Alert(
        name="GatewayRelayFails",
        expression="increase(rollbridge_gateway_relay_errors_total[15m]) > 20",
        pending="5m",
        urgency=Urgency.WARNING,
        summary="Gateway at {{ $labels.instance }} loses brokers for its clients",
        description="{{ $labels.instance }} ({{ $labels.job }}) has closed {{ $value | humanize }} connections of "
        "clients within a quarter of an hour, since their broker could not be reached or had closed its own.",
        means="What is not a transaction is relayed, on a connection to a broker for each client. Consumers, "
        "administration and Metadata of these clients fail, and are tried again.",
        look=(
            "`rollbridge doctor`: `gateway-brokers`",
            "whether the gateway's machine reaches each broker at its advertised address",
            "brokers that refuse connections: `max.connections`, `max.connections.per.ip` of the gateway's address",
        ),
        remedies=(
            Remedy(
                "gateway-brokers",
                "look whether the machine of gateway {name} reaches every broker at the address that brokers advertise",
                "without an answer",
            ),
            Remedy(
                "gateway-brokers",
                "the log of gateway {name} says why it cannot listen at one more port, mostly since another process "
                "has it: free that port, or start it with --listen before a row of free ones",
                "without a port",
            ),
        ),
        avoid="raise time-outs of clients: their requests are not slow, they have no broker.",
        threshold="A broker that restarts closes each connection once; more than a few for minutes is none.",
    ),
    Alert(
        name="GatewayRefuses",
        expression='sum by (job, code) (increase(rollbridge_gateway_errors_total{code=~"TOPIC_AUTHORIZATION_FAILED|'
        'TRANSACTIONAL_ID_AUTHORIZATION_FAILED|GROUP_AUTHORIZATION_FAILED|INVALID_TOPIC_EXCEPTION"}[15m])) > 5',
        pending="1m",
        urgency=Urgency.WARNING,
        summary="Producers at gateways are refused: {{ $labels.code }}",
        description="{{ $value | humanize }} requests of transactional producers ({{ $labels.job }}) were refused "
        "with {{ $labels.code }} within a quarter of an hour.",
        means="A producer lacks a right, or the gateway does, or it writes to a topic that no stream has adopted "
        "(INVALID_TOPIC_EXCEPTION). It does not get on by itself.",
        look=(
            "the gateways' logs: they name transactional id, request and topic",
            "`rollbridge doctor`: `gateway-rights`, if it is the gateway that lacks a right",
            "[rights of a gateway's clients](security.md#gateways)",
        ),
        actions=(
            "A topic without a stream: `rollbridge stream adopt TOPIC`, if transactions are to go there.",
            "A client without a right: `kafka-acls.sh`, for the principal with which it logs in.",
        ),
        remedies=(
            Remedy(
                "gateway-rights",
                "rollbridge access kafka-acls gateway {stream} prints the commands that grant it to the principal of "
                "gateway {name}, which looks again within a minute",
            ),
        ),
        avoid="give clients the gateway's principal: then all of them may write to all streams.",
        threshold="Single ones are mistakes that somebody is about to notice.",
    ),
    Alert(
        name="GatewayHolds",
        expression='sum by (job) (increase(rollbridge_gateway_handovers_total{way="refused"}[10m])) > 0',
        pending="1m",
        urgency=Urgency.CRITICAL,
        summary="A gateway does not let go of transactional ids ({{ $labels.job }})",
        description="Another gateway was asked for a transactional id, and the one that holds it has not let go of "
        "it within 15 s. Its producer stands still.",
        means="A gateway that lives lets go at once, and one that has died or stands still loses its ids with its "
        "lease. This one writes its lease and does nothing else.",
        look=(
            "`rollbridge doctor`: `gateway-holds` names it",
            "its log, and `rollbridge_gateway_loop_lag_seconds` of all of them",
        ),
        remedies=(
            Remedy(
                "gateway-holds",
                "end the process of gateway {name} with kill -9, and start it again: with its lease its ids are free",
            ),
        ),
        avoid="delete nodes below `/gateways/held`: the gateway goes on to believe that it holds the id.",
        threshold="It never happens in good order.",
    ),
    Alert(
        name="GatewayHandovers",
        expression='sum by (job) (increase(rollbridge_gateway_handovers_total{way="given"}[10m])) > 20',
        pending="15m",
        urgency=Urgency.WARNING,
        summary="Transactional ids go to and fro between gateways ({{ $labels.job }})",
        description="{{ $value | humanize }} transactional ids of {{ $labels.job }} have changed gateways within ten "
        "minutes, while gateways neither came nor went. A transaction may do so 1,000 times.",
        means="Requests for one id come to several gateways: two producers share it, or clients are told different "
        "things by different gateways.",
        look=(
            "`rollbridge doctor`: `gateway-address`, `gateway-brokers`; RollbridgeGatewaysDisagree",
            "whether two processes have the same `transactional.id`: each fences the other",
            "a load balancer before the gateways, which sends connections of one client to several",
        ),
        actions=(
            (
                "Take the load balancer away, or have it keep to one gateway for each client address; name the "
                "gateways themselves in `bootstrap.servers`."
            ),
        ),
        avoid="end transactions by hand because of it.",
        threshold="A gateway that ends gives away what it has, once, which is over after ten minutes.",
    ),
    Alert(
        name="GatewayDefect",
        expression="sum by (job, instance, api) "
        '(increase(rollbridge_gateway_errors_total{code="UNKNOWN_SERVER_ERROR"}[15m])) > 0',
        pending="1m",
        urgency=Urgency.WARNING,
        summary="Gateway at {{ $labels.instance }} answered {{ $labels.api }} with an error that nobody foresaw",
        description="{{ $labels.instance }} ({{ $labels.job }}) has told a producer UNKNOWN_SERVER_ERROR. Its log has "
        "the request and the stack.",
        means="Something happened that the gateway has no word for. Most clients give up at this code.",
        look=("the gateway's log, at ERROR: request, transactional id, stack",),
        actions=("Restart the producer that gave up. Report it with these lines: it is a defect of ours.",),
        avoid="raise retries of clients: they do not ask again at this code.",
        threshold="There should be none.",
    ),
)
