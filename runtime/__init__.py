"""Memory and communication: layouts, buckets, shards as DTensors, the eager path, optimizer integration.

Imports neither the front door nor the passes.
"""
