"""The live view of the cache and the queues."""
