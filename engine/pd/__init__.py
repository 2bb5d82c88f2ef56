"""The prefill/decode pair: pure mappings and cores, and the shells that carry them over NIXL and processes."""
