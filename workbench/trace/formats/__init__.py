"""Other people's files and wires: OTLP, scrapes of /metrics, KV events, request logs, Chrome traces, pandas."""
