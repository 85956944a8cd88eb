"""Plain data: where elements lie, which ranks share them, how buckets are exchanged. No memory, no communication."""
