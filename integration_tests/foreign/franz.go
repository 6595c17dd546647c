// franz BOOTSTRAP TOPIC ID RECORDS END...: a transaction of so many records for each END, which is commit, abort or lost;
// with franz-go, which implements the protocol by itself. Prints a line for each.
//
// One that is lost is committed once a line of standard input says that somebody has aborted it. That has to be refused
// as abortable.
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

func main() {
	bootstrap, topic, id := os.Args[1], os.Args[2], os.Args[3]
	records, err := strconv.Atoi(os.Args[4])
	if err != nil {
		log.Fatal(err)
	}
	client, err := kgo.NewClient(
		kgo.SeedBrokers(bootstrap),
		kgo.TransactionalID(id),
		kgo.TransactionTimeout(10*time.Minute),
		kgo.DefaultProduceTopic(topic),
		kgo.ProducerLinger(5*time.Millisecond),
	)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	ctx := context.Background()
	for round, end := range os.Args[5:] {
		if err := client.BeginTransaction(); err != nil {
			log.Fatal(err)
		}
		for at := 0; at < records; at++ {
			number := round*records + at
			record := &kgo.Record{
				Key:   []byte(fmt.Sprintf("key-%d", number%10)),
				Value: []byte(fmt.Sprintf("%s-%d", id, number)),
			}
			client.Produce(ctx, record, func(_ *kgo.Record, err error) {
				if err != nil {
					log.Fatal(err)
				}
			})
		}
		if err := client.Flush(ctx); err != nil {
			log.Fatal(err)
		}
		if end == "lost" {
			fmt.Println("written")
			if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
				log.Fatal(err)
			}
			err := client.EndTransaction(ctx, kgo.TryCommit)
			// Its first transaction is one of transactions v1.
			if !errors.Is(err, kerr.TransactionAbortable) && !errors.Is(err, kerr.InvalidProducerIDMapping) {
				log.Fatal(err)
			}
		}
		if err := client.EndTransaction(ctx, end == "commit"); err != nil {
			log.Fatal(err)
		}
		fmt.Println(end)
	}
}
