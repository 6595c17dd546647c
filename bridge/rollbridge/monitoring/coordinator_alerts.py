"""Alerts on coordinators, their leaderships, and what these stand on: ZooKeeper, and clocks."""

from __future__ import annotations

from typing import Final

from rollbridge.monitoring.alerts import Alert, Remedy, Urgency

COORDINATOR_ALERTS: Final = (
    Alert(
        name="NoCoordinator",
        expression="""\
(
  count by (job) (last_over_time(rollbridge_coordinator_info[1d]))
  unless on (job) count by (job) (rollbridge_coordinator_info)
)
or on () absent(rollbridge_coordinator_info)""",
        pending="1m",
        urgency=Urgency.CRITICAL,
        summary="No coordinator is running{{ with $labels.job }} ({{ . }}){{ end }}",
        description="No coordinator answers Prometheus. Nothing is committed, and readers see nothing new of "
        "transactions.",
        means="Prometheus reaches no coordinator of this installation. Writers go on to write into the buffers, "
        "commits wait and then end as `outcome-unknown`; nothing that was written is lost.",
        look=(
            (
                "the processes on their machines: do they run, what do their last log lines say? One that is there and "
                "answers nothing, as it was stopped or its machine hangs, counts as gone"
            ),
            (
                "`rollbridge doctor`, from a machine of theirs: it asks Kafka and ZooKeeper, not Prometheus. If "
                "it knows coordinators, they run, and it is Prometheus that does not reach them"
            ),
            "the page of targets in Prometheus, if so: an address, a port or a firewall has changed",
        ),
        actions=(
            (
                "If a coordinator ends right after its start, its last line says why: most often Kafka or "
                "ZooKeeper does not answer, or a setting is wrong."
            ),
        ),
        remedies=(Remedy("no-coordinator", "start one: rollbridge coordinator"),),
        avoid="delete anything in ZooKeeper or Kafka so that it starts: a coordinator that starts reads what is "
        "there, and goes on.",
        threshold="A minute is three scrapes or more, and longer than any takeover by a standby. Installations that "
        "Prometheus has not seen for a day are forgotten.",
    ),
    Alert(
        name="CoordinatorDown",
        expression="(up == 0) and on (job, instance) last_over_time(rollbridge_coordinator_info[1d])",
        pending="2m",
        urgency=Urgency.WARNING,
        summary="Coordinator at {{ $labels.instance }} does not answer",
        description="{{ $labels.instance }} of {{ $labels.job }} was a coordinator within the last day, and "
        "Prometheus does not reach it. Others have taken over what it led.",
        means="One coordinator has ended, or its machine or the way to it is gone. Groups that it led have another "
        "leader, if there is one.",
        look=(
            "whether its process runs; `rollbridge status` lists those that ZooKeeper knows",
            "the end of its log: a coordinator that is asked to end says so",
        ),
        actions=("Start it again, under the same name. It follows what the others lead.",),
        avoid="start a second one under the name of one that still runs: names are unique.",
        threshold="Two minutes are more than a restart takes, also in a rolling upgrade.",
    ),
    Alert(
        name="CoordinatorUnhealthy",
        expression="rollbridge_coordinator_healthy == 0",
        pending="1m",
        urgency=Urgency.WARNING,
        summary="Coordinator at {{ $labels.instance }} could not lead",
        description="{{ $labels.instance }} of {{ $labels.job }} runs, but could not lead a group now; /healthz at "
        "the same address says why.",
        means="A coordinator runs and could not take over a group: its ZooKeeper session does not live, it is not "
        "registered, Kafka or one of its brokers does not answer, or the thread of a group has ended. If all are like "
        "that, RollbridgeNoLeader follows.",
        look=(
            "`/healthz` of the coordinator: a line for each reason",
            "its log at that time; a line with `defect:` is one of ours, worth a report with its stack",
            "the other coordinators: if all say the same, it is the server that they name",
        ),
        actions=(
            (
                "`not connected to ZooKeeper`, `Kafka does not answer`, `cannot reach broker`: mend the server or the "
                "network. The coordinator is healthy again by itself."
            ),
            "`the thread of group ... has ended`: restart the coordinator. Another one leads meanwhile.",
            "`not registered among the coordinators` for long: another process runs under its name.",
        ),
        remedies=(
            Remedy(
                "broker-unreachable",
                "look at that broker, and at the network between it and the coordinator: the cluster takes the broker "
                "for alive, so nobody else takes over what it leads, and commits that need it wait",
            ),
        ),
        avoid="restart it because of a server that is away: it waits, and is back sooner than a new process.",
        threshold="A minute outlasts ZooKeeper sessions that time out (6 s) and the probes of Kafka (5 s).",
    ),
    Alert(
        name="NoLeader",
        expression="max by (job) (rollbridge_coordinator_groups) - sum by (job) (rollbridge_coordinator_groups_led) "
        "> 0",
        pending="1m",
        urgency=Urgency.CRITICAL,
        summary="{{ $value }} groups have no leader ({{ $labels.job }})",
        description="Coordinators run, and {{ $value }} of the groups that they know are led by none of them. "
        "Transactions of these groups do not commit.",
        means="A group has no leader, or one that is still taking over. Its writers go on to write, its commits wait.",
        look=(
            "`rollbridge doctor`: `no-leader` and `taking-over` name the group",
            "the logs of the coordinators: `gives up the lead` with the reason, or how far a takeover has come",
            "RollbridgeCoordinatorUnhealthy of each coordinator",
        ),
        actions=(
            "A leader that gives up again and again names what is refused: grant the right, put the topic right.",
            "A takeover that reads for long comes to its end by itself. A standby makes the next one short.",
        ),
        remedies=(
            Remedy("no-leader", "wait for some seconds; if it stays so, look into the coordinators' logs"),
            Remedy(
                "taking-over",
                "commits wait until it is done; its log says what it reads, and a standby makes the next one short",
            ),
            Remedy(
                "zookeeper-outdated",
                "rollbridge repair --dry-run shows what is to be done, rollbridge repair does it",
            ),
        ),
        avoid="remove the leader's node in ZooKeeper by hand, nor restart a coordinator that is taking over: it "
        "would begin again.",
        threshold="Takeovers behind a standby take less than a second, others seconds for each million messages; "
        "what takes longer than a minute is for a person.",
    ),
    Alert(
        name="LeaderStandsStill",
        expression="min by (job, group) (rollbridge_readings_age_seconds) > 300",
        pending="5m",
        urgency=Urgency.CRITICAL,
        summary="Leader of group {{ $labels.group }} has stood still for {{ $value | humanizeDuration }}",
        description="The leader of group {{ $labels.group }} ({{ $labels.job }}) holds the lead and has come to no end "
        "of what it does for {{ $value | humanizeDuration }}. Its other metrics are as old as that.",
        means="A leader takes its metrics every second, between two steps of its work. This one waits for one answer, "
        "or stands still; commits of its group wait with it, and ages and lags on the board stand still, too.",
        look=(
            "the last lines of the leader's log: what it has begun, such as a merge or a seal",
            "the brokers: a partition without a leader, or without enough replicas in sync, holds up a merge",
            "processor of the leader's process: none is waiting, a whole one is a defect",
        ),
        actions=(
            (
                "A merge that makes progress ends by itself, after `MERGE_TIMEOUT_S` at the latest. "
                "`MERGE_BESIDE_BYTES` has large transactions merged beside the line."
            ),
            "Bring the brokers back that it waits for.",
            "If nothing is wrong with the brokers, restart the coordinator: the next leader finishes what was begun.",
        ),
        avoid="restart it in the middle of a merge that makes progress: the next one begins with it anew.",
        threshold="Ten minutes in all, less than the 15 that a merge may take: somebody looks before it is given up.",
    ),
    Alert(
        name="NoStandby",
        expression="max by (job, group) (rollbridge_controller_epoch) unless on (job, group) "
        "(rollbridge_standby_lag_messages >= 0)",
        pending="5m",
        urgency=Urgency.WARNING,
        summary="Nobody follows the leader of group {{ $labels.group }}",
        description="Group {{ $labels.group }} of {{ $labels.job }} has a leader and no standby. If the leader ends, "
        "the next one reads everything since the last snapshots; if there is no second coordinator, nobody takes "
        "over.",
        means="The group is led, and would not be for a while if its leader ended: there is only one coordinator, or "
        "the standby has paused because it would hold too many transactions.",
        look=(
            "how many coordinators there are: `rollbridge doctor` says `no-standby` if it is one",
            "the log of the others: `a standby follows no longer` says why",
            "`rollbridge txn list`: a transaction that has been open for long makes a standby hold all since",
        ),
        actions=(
            (
                "A standby that has paused tries again within a minute: end what has been open for long, or "
                "raise `STANDBY_TRANSACTIONS_MAX`."
            ),
            "With `STANDBY_TRANSACTIONS_MAX` at 0 there is none by intent: take the rule out.",
        ),
        remedies=(Remedy("no-standby", "start another one, on another machine"),),
        avoid="put the second coordinator on the machine of the first: it would go with it.",
        threshold="A new standby has read what there is within seconds; after five minutes it does not come by itself.",
    ),
    Alert(
        name="StandbyLags",
        expression="min by (job, group) (rollbridge_standby_lag_messages >= 0) > 40000",
        pending="5m",
        urgency=Urgency.WARNING,
        summary="Standby of group {{ $labels.group }} lags by {{ $value | humanize }} messages",
        description="The closest standby of group {{ $labels.group }} ({{ $labels.job }}) has {{ $value | humanize "
        "}} messages of the buffers to read. A takeover would have to read them first.",
        means="Those who follow the leader do not keep up with the buffers. Nothing is slower for that, but a "
        "takeover.",
        look=(
            "processor and network of the standby's machine: it reads what the leader reads",
            "RollbridgeFoldLag: if the leader lags as well, a broker answers slowly, or writers are faster than either",
        ),
        actions=("Give its machine more, or spread the streams over several groups, whose leaders may differ.",),
        avoid="restart the standby: it would read all of it once more.",
        threshold="From 40,000 messages on a coordinator does not call itself warm any more, and is not chosen first.",
    ),
    Alert(
        name="TakeoversFlap",
        expression="max by (job, group) (rollbridge_controller_epoch)\n"
        "  - min by (job, group) (min_over_time(rollbridge_controller_epoch[30m])) >= 4",
        pending="1m",
        urgency=Urgency.WARNING,
        summary="Group {{ $labels.group }} has changed leaders {{ $value }} times in 30 minutes",
        description="The lead of group {{ $labels.group }} ({{ $labels.job }}) does not stay where it is. Commits "
        "wait for a moment each time.",
        means="Terms of leaders are short. Each change costs commits the time of a takeover, and none is lost.",
        look=(
            "the logs of the leaders: `no longer the leader` and `gives up the lead` say why",
            "`rollbridge_zookeeper_interruptions_total`: sessions that end for pauses, or for a network that drops",
            "processor and memory of their machines: a process that stands still for 6 s loses its session",
        ),
        actions=(
            "`gives up the lead` over an authorization, a topic or a node: put right what it names.",
            "Sessions that end: give the machine room, or raise `--session-timeout`, which makes real takeovers later.",
        ),
        avoid="stop the coordinators but one: it flaps as well, and there is nobody to take over.",
        threshold="A rolling restart of three coordinators moves a group three times at most.",
    ),
    Alert(
        name="ClocksDiffer",
        expression="max by (job, group) (rollbridge_clocks_differ) == 1",
        pending="5m",
        urgency=Urgency.WARNING,
        summary="Clocks differ, group {{ $labels.group }} deletes nothing for its age",
        description="Clocks of the leader of group {{ $labels.group }} ({{ $labels.job }}), ZooKeeper and the "
        "brokers are more than a minute apart. Retentions stand still, leases may end late; commits and reads go on.",
        means="A machine's clock is wrong, so nothing is deleted for its age: streams, outcomes and the commit log "
        "grow.",
        look=(
            "`rollbridge_clock_spread_seconds`: by how much",
            "the WARNING of the leader: `the clocks of this machine, ZooKeeper and the brokers differ by`",
            "the clock and the NTP daemon of each machine",
        ),
        actions=("[When clocks differ](#when-clocks-differ) says what goes on meanwhile and what does not.",),
        remedies=(
            Remedy(
                "clock",
                "set the clocks of coordinators, brokers and ZooKeeper servers by NTP; then restart the coordinator",
            ),
        ),
        avoid="restart the coordinator before the clocks are right: it would find the same.",
        threshold="The limit of a minute is the leader's own. It does not change within a term, so there is no hurry.",
    ),
    Alert(
        name="ZooKeeperDisconnected",
        expression="rollbridge_zookeeper_connected == 0",
        pending="30s",
        urgency=Urgency.WARNING,
        summary="Coordinator at {{ $labels.instance }} has no ZooKeeper session",
        description="{{ $labels.instance }} of {{ $labels.job }} has no ZooKeeper session that is known to live; it "
        "leads nothing. If that holds for all of them, nothing commits.",
        means="A coordinator without a session leads nothing, and another one takes over. If none of them has one, "
        "RollbridgeNoLeader follows, and clients that are connected go on to write.",
        look=(
            "whether it is one coordinator or all of them: the network of one machine, or ZooKeeper",
            "ZooKeeper's servers: `srvr` says whether there is a leader; two of three are needed",
            "`rollbridge_zookeeper_request_duration_seconds` before it was lost: a slow disk shows first",
        ),
        actions=("Bring ZooKeeper or the network back. Coordinators connect by themselves, and lead again.",),
        avoid="restore ZooKeeper from a backup while its servers can still come back: that loses what came since, "
        "and needs [a repair](#when-zookeeper-was-restored-from-a-backup).",
        threshold="Half a minute is five times the session time-out: by then the lead is gone.",
    ),
    Alert(
        name="ZooKeeperInterrupted",
        expression="increase(rollbridge_zookeeper_interruptions_total[30m]) > 3",
        pending="1m",
        urgency=Urgency.WARNING,
        summary="Coordinator at {{ $labels.instance }} loses ZooKeeper again and again",
        description="The connection of {{ $labels.instance }} ({{ $labels.job }}) to ZooKeeper was lost {{ $value | "
        "humanize }} times in half an hour.",
        means="The connection comes back each time, but a leader stops deciding while it is away, and a session that "
        "ends costs a takeover.",
        look=(
            "long pauses of the coordinator's machine: swapping, a frozen virtual machine, too few processors",
            "ZooKeeper's logs and its disk: a slow `fsync` drops sessions",
            "the network between them",
        ),
        actions=("Give ZooKeeper a disk of its own; give coordinators processor time that nobody takes away.",),
        avoid="raise the session time-out first: it hides pauses, and makes real takeovers later.",
        threshold="A rolling restart of three ZooKeeper servers drops a connection three times at most.",
    ),
    Alert(
        name="ZooKeeperSlow",
        expression="histogram_quantile(0.99, sum by (job, instance, le) "
        "(rate(rollbridge_zookeeper_request_duration_seconds_bucket[10m]))) > 0.5",
        pending="10m",
        urgency=Urgency.WARNING,
        summary="ZooKeeper answers {{ $labels.instance }} slowly",
        description="One in a hundred requests of {{ $labels.instance }} ({{ $labels.job }}) to ZooKeeper takes {{ "
        "$value | humanizeDuration }} or longer.",
        means="Scales, rolling commits, takeovers and admin requests write to ZooKeeper and wait for it. Plain "
        "commits do not, until sessions end.",
        look=(
            "by `operation`: reads are slow where servers or the network are, writes where the disk is",
            "ZooKeeper's disk and its heap: collections of garbage stop it for seconds",
        ),
        actions=("Give ZooKeeper a disk of its own, and enough heap.",),
        avoid="add ZooKeeper servers for it: each write waits for a majority of them.",
        threshold="A healthy ensemble answers within some milliseconds; from half a second on a session of 6 s is in "
        "danger.",
    ),
)
