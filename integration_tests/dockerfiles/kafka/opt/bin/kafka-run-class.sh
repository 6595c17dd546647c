#!/bin/bash
# Run a class of Kafka with the variables that Kafka's own launcher knows.
home=/opt/kafka
: "${KAFKA_LOG4J_OPTS:=-Dlog4j2.configurationFile=/etc/kafka/docker/tools-log4j2.yaml}"
jmx=()
if [[ -n ${JMX_PORT-} && ${KAFKA_JMX_OPTS-} != *jmxremote.port* ]]; then
  jmx=("-Dcom.sun.management.jmxremote.port=$JMX_PORT" -Dcom.sun.management.jmxremote.authenticate=false
    -Dcom.sun.management.jmxremote.ssl=false)
fi
# shellcheck disable=SC2086 # options are words
exec java ${KAFKA_HEAP_OPTS:--Xmx256M} ${KAFKA_JVM_PERFORMANCE_OPTS:--XX:+UseSerialGC -XX:TieredStopAtLevel=1} \
  -Xshare:auto -Xlog:cds=off -Djava.awt.headless=true "${jmx[@]}" ${KAFKA_JMX_OPTS-} $KAFKA_LOG4J_OPTS ${KAFKA_OPTS-} \
  -cp "${CLASSPATH:+$CLASSPATH:}$(printf '%s:' "$home"/libs/*.jar)" "$@"
