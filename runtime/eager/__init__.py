"""The eager path: gathers, releases and reductions from hooks, without a compiler."""
