// node kafkajs.js BOOTSTRAP TOPIC ID RECORDS END...: a transaction of so many records for each END, which is commit or
// abort; with kafkajs, which speaks old versions of the protocol. Prints a line for each.
const { Kafka, logLevel } = require("kafkajs");

const [bootstrap, topic, id, records, ...ends] = process.argv.slice(2);

async function main() {
  const kafka = new Kafka({ brokers: [bootstrap], logLevel: logLevel.ERROR, requestTimeout: 60000 });
  const producer = kafka.producer({
    transactionalId: id,
    idempotent: true,
    maxInFlightRequests: 1,
    transactionTimeout: 600000,
  });
  await producer.connect();
  for (const [round, end] of ends.entries()) {
    const transaction = await producer.transaction();
    const numbers = [...Array(Number(records)).keys()].map((at) => round * Number(records) + at);
    await transaction.send({
      topic,
      messages: numbers.map((number) => ({ key: `key-${number % 10}`, value: `${id}-${number}` })),
    });
    await (end === "commit" ? transaction.commit() : transaction.abort());
    console.log(end);
  }
  await producer.disconnect();
}

main().catch((fault) => {
  console.error(fault);
  process.exit(1);
});
