rollbridge stream create sales/orders --segments 2 --if-not-exists
printf 'a:1\nb:2\n' | rollbridge produce sales/orders --key-separator :
rollbridge consume sales/orders --format '{key} {value} {dlsn}'
rollbridge stream history sales/orders
