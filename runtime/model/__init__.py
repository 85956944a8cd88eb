"""The sharded model: how it is made, what it coordinates, how it recovers."""
