#!/bin/bash
home=$(dirname "$(dirname "$(readlink -f "$0")")")
# shellcheck disable=SC2086 # options are words
exec java "-Xmx${ZK_CLIENT_HEAP:-256}m" ${CLIENT_JVMFLAGS-} -cp "$home/lib/*:${ZOOCFGDIR:-/conf}" \
  org.apache.zookeeper.ZooKeeperMain "$@"
