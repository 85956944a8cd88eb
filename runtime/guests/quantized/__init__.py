"""Buckets that are gathered in float8 or float4."""
