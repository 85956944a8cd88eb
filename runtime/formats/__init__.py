"""How parameters are written where they are gathered: dtypes, float8 and float4, classes with a gather of their own."""
