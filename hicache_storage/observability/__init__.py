"""What can be seen of a store from outside: metrics, traces, request ids and logs. The core needs none of the libraries."""
