#!/bin/bash
# All of Kafka's command-line tools: the name under which it is called says which.
case ${0##*/} in
  kafka-acls.sh) class=org.apache.kafka.tools.AclCommand ;;
  kafka-broker-api-versions.sh) class=org.apache.kafka.tools.BrokerApiVersionsCommand ;;
  kafka-client-metrics.sh) class=org.apache.kafka.tools.ClientMetricsCommand ;;
  kafka-cluster.sh) class=org.apache.kafka.tools.ClusterTool ;;
  kafka-configs.sh) class=kafka.admin.ConfigCommand ;;
  kafka-console-consumer.sh) class=org.apache.kafka.tools.consumer.ConsoleConsumer ;;
  kafka-console-producer.sh) class=org.apache.kafka.tools.ConsoleProducer ;;
  kafka-console-share-consumer.sh) class=org.apache.kafka.tools.consumer.ConsoleShareConsumer ;;
  kafka-consumer-groups.sh) class=org.apache.kafka.tools.consumer.group.ConsumerGroupCommand ;;
  kafka-consumer-perf-test.sh) class=org.apache.kafka.tools.ConsumerPerformance ;;
  kafka-delegation-tokens.sh) class=org.apache.kafka.tools.DelegationTokenCommand ;;
  kafka-delete-records.sh) class=org.apache.kafka.tools.DeleteRecordsCommand ;;
  kafka-dump-log.sh) class=kafka.tools.DumpLogSegments ;;
  kafka-features.sh) class=org.apache.kafka.tools.FeatureCommand ;;
  kafka-get-offsets.sh) class=org.apache.kafka.tools.GetOffsetShell ;;
  kafka-groups.sh) class=org.apache.kafka.tools.GroupsCommand ;;
  kafka-jmx.sh) class=org.apache.kafka.tools.JmxTool ;;
  kafka-leader-election.sh) class=org.apache.kafka.tools.LeaderElectionCommand ;;
  kafka-log-dirs.sh) class=org.apache.kafka.tools.LogDirsCommand ;;
  kafka-metadata-quorum.sh) class=org.apache.kafka.tools.MetadataQuorumCommand ;;
  kafka-producer-perf-test.sh) class=org.apache.kafka.tools.ProducerPerformance ;;
  kafka-reassign-partitions.sh) class=org.apache.kafka.tools.reassign.ReassignPartitionsCommand ;;
  kafka-share-groups.sh) class=org.apache.kafka.tools.consumer.group.ShareGroupCommand ;;
  kafka-storage.sh) class=kafka.tools.StorageTool ;;
  kafka-topics.sh) class=org.apache.kafka.tools.TopicCommand ;;
  kafka-transactions.sh) class=org.apache.kafka.tools.TransactionsCommand ;;
  *) echo "${0##*/} is not among the tools of this image" >&2; exit 2 ;;
esac
exec /opt/kafka/bin/kafka-run-class.sh "$class" "$@"
