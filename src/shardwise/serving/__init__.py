"""Generation from prompts (later: the continuous-batching engine and its HTTP server)."""
