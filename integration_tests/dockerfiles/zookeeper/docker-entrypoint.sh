#!/bin/bash
# Write zoo.cfg from ZOO_... variables unless it is there, and run the command, as the official image does.
set -euo pipefail

if [[ ${1-} == zkServer.sh && $(id -u) == 0 ]]; then
  chown -R zookeeper "$ZOO_DATA_DIR" "$ZOO_DATA_LOG_DIR" "$ZOO_LOG_DIR"
  exec setpriv --reuid=1000 --regid=1000 --clear-groups "$0" "$@"
fi

config=$ZOO_CONF_DIR/zoo.cfg
if [[ ! -f $config ]]; then
  {
    echo "dataDir=$ZOO_DATA_DIR"
    echo "dataLogDir=$ZOO_DATA_LOG_DIR"
    echo "tickTime=$ZOO_TICK_TIME"
    echo "initLimit=$ZOO_INIT_LIMIT"
    echo "syncLimit=$ZOO_SYNC_LIMIT"
    echo "autopurge.snapRetainCount=$ZOO_AUTOPURGE_SNAPRETAINCOUNT"
    echo "autopurge.purgeInterval=$ZOO_AUTOPURGE_PURGEINTERVAL"
    echo "maxClientCnxns=$ZOO_MAX_CLIENT_CNXNS"
    echo "standaloneEnabled=$ZOO_STANDALONE_ENABLED"
    echo "admin.enableServer=$ZOO_ADMINSERVER_ENABLED"
    [[ -z ${ZOO_4LW_COMMANDS_WHITELIST-} ]] || echo "4lw.commands.whitelist=$ZOO_4LW_COMMANDS_WHITELIST"
    # Both are lists of words, without blanks in an entry.
    for entry in ${ZOO_SERVERS:-"server.1=localhost:2888:3888;2181"} ${ZOO_CFG_EXTRA-}; do echo "$entry"; done
  } >"$config"
fi
[[ -f $ZOO_DATA_DIR/myid ]] || echo "${ZOO_MY_ID:-1}" >"$ZOO_DATA_DIR/myid"
exec "$@"
