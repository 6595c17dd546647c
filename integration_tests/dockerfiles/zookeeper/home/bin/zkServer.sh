#!/bin/bash
# The commands of ZooKeeper's own script that make sense in a container.
home=$(dirname "$(dirname "$(readlink -f "$0")")")
classpath=$(printf '%s:' "$home"/lib/*.jar)${ZOOCFGDIR:-/conf}
case ${1:-start-foreground} in
  start-foreground)
    # shellcheck disable=SC2086 # options are words
    exec java "-Dzookeeper.log.dir=${ZOO_LOG_DIR:-/logs}" "-Xmx${ZK_SERVER_HEAP:-1000}m" -XX:+HeapDumpOnOutOfMemoryError \
      -XX:OnOutOfMemoryError='kill -9 %p' "-XX:SharedArchiveFile=$home/zookeeper.jsa" -Xshare:auto -Xlog:cds=off \
      ${SERVER_JVMFLAGS-} ${JVMFLAGS-} -cp "$classpath" org.apache.zookeeper.server.quorum.QuorumPeerMain \
      "${ZOOCFGDIR:-/conf}/zoo.cfg"
    ;;
  status)
    java -Xmx64m -cp "$classpath" org.apache.zookeeper.client.FourLetterWordMain localhost 2181 srvr | grep Mode
    ;;
  *)
    echo "usage: $0 start-foreground|status" >&2
    exit 2
    ;;
esac
