for role in alice:writer coordinator:coordinator; do
  rollbridge access kafka-acls ${role#*:} sales/orders --principal User:${role%:*} --consumer-group billing
done
