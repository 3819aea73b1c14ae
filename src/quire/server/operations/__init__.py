"""Operating a server: admission, health, metrics, logs, traces, shutdown."""
